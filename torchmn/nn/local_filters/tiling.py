"""Tiling: which pixels of an image belong to which receptive field."""

from __future__ import annotations

from typing import NamedTuple


class Tiling(NamedTuple):
    """Receptive fields of `kernel`, every `stride`-th, in an image of `size` that contains its padding."""

    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]

    @property
    def positions(self) -> tuple[int, int]:
        """How many fields there are along height and width; none in an image that is smaller than the kernel."""
        return tuple(max(0, (n - k) // s + 1) for n, k, s in zip(*self, strict=True))  # type: ignore[return-value]

    def of_rows(self, rows: slice) -> tuple[slice, Tiling]:
        """The rows of pixels that some rows of fields see, and the tiling of those pixels."""
        first, last = rows.start * self.stride[0], (rows.stop - 1) * self.stride[0] + self.kernel[0]
        return slice(first, last), Tiling((last - first, self.size[1]), self.kernel, self.stride)
