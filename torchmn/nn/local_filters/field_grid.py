"""FieldGrid: the positions of receptive fields in an image."""

from __future__ import annotations

from typing import NamedTuple


class FieldGrid(NamedTuple):
    """A grid of receptive fields.

    Attributes:
        size: (height, width) of the image, including its padding.
        kernel: (height, width) of a field.
        stride: distance between fields along height and width.
    """

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    @property
    def positions(self) -> tuple[int, int]:
        """The number of fields along height and width; 0 in an image that is smaller than the kernel."""
        rows, columns = (max(0, (n - k) // s + 1) for n, k, s in zip(self.size, self.kernel, self.stride, strict=True))
        return rows, columns

    def of_rows(self, rows: slice) -> tuple[slice, FieldGrid]:
        """Returns the rows of pixels in these rows of fields, and the grid of the fields in those pixels."""
        first, last = rows.start * self.stride[0], (rows.stop - 1) * self.stride[0] + self.kernel[0]
        return slice(first, last), FieldGrid((last - first, self.size[1]), self.kernel, self.stride)
