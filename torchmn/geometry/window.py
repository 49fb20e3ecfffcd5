"""A layer's window along one dim: how many outputs it makes, and which inputs an output needs."""

from __future__ import annotations

from dataclasses import dataclass

from torchmn.errors import HaloError
from torchmn.geometry.interval import Interval


@dataclass(frozen=True)
class Window:
    """Kernel, stride, padding (low, high), dilation of a convolution or a pool along one dim.

    padding: an int stands for both ends; below zero, that much of the image is left out
    ceil_mode: a last window that is not full counts too, as in torch's pools
    transposed: of a transposed convolution; `output_padding` is only for these
    """

    kernel: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)  # made of an int where one is given
    dilation: int = 1
    ceil_mode: bool = False
    transposed: bool = False
    output_padding: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.padding, int):
            object.__setattr__(self, "padding", (self.padding, self.padding))
        at_least_one = (self.kernel, self.stride, self.dilation)
        if not (
            all(isinstance(number, int) and number >= 1 for number in at_least_one)
            and isinstance(self.padding, tuple)
            and len(self.padding) == 2
            and all(isinstance(number, int) for number in (*self.padding, self.output_padding))
        ):
            raise HaloError(
                "expected a window of whole numbers, kernel, stride and dilation at least 1, padding (low, high), got "
                f"kernel {self.kernel!r}, stride {self.stride!r}, padding {self.padding!r}, "
                f"dilation {self.dilation!r}, output_padding {self.output_padding!r}"
            )

    @property
    def span(self) -> int:
        """How many indices lie between the first and the last that the kernel touches, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def output_extent(self, extent: int, name: str | None = None) -> int:
        """How many outputs a dim of `extent` gives, by torch's formulas; HaloError, with `name`, if there are none."""
        low, high = self.padding
        if self.transposed:
            outputs = (extent - 1) * self.stride - low - high + self.span + self.output_padding if extent else 0
        else:
            room = extent + low + high - self.span
            outputs = (-(-room // self.stride) if self.ceil_mode else room // self.stride) + 1
            # A window that would begin behind the image and its lower padding sees nothing but padding.
            if self.ceil_mode and (outputs - 1) * self.stride >= extent + low:
                outputs -= 1
        if outputs < 1:
            raise HaloError(
                f"{named(name)}({self}) has no output for an image of {extent} along this dim: the image is smaller "
                "than the window. Use a smaller kernel, more padding, or a larger image."
            )
        return outputs

    def needed(self, outputs: Interval, extent: int) -> Interval:
        """The inputs that `outputs` are made of: padding where they are below 0 or not below `extent`.

        Nothing is needed for no outputs.
        """
        if not outputs:
            return Interval(0, 0)
        low = self.padding[0]
        first, last = outputs.start, outputs.stop - 1
        if self.transposed:
            # output = input * stride - low + tap * dilation, for every tap of the kernel
            return Interval(-(-(first + low - self.span + 1) // self.stride), (last + low) // self.stride + 1)
        return Interval(first * self.stride - low, last * self.stride - low + self.span)

    def __str__(self) -> str:
        low, high = self.padding
        words = [f"kernel {self.kernel}", f"stride {self.stride}", f"padding {low if low == high else self.padding}"]
        words += [f"dilation {self.dilation}"] * (self.dilation != 1) + ["ceil_mode"] * self.ceil_mode
        words += [f"output_padding {self.output_padding}"] * (self.output_padding != 0)
        return ("transposed " if self.transposed else "") + ", ".join(words)


def named(name: str | None) -> str:
    """`name` and a blank, as an error message begins; "window " where a module has no name."""
    return f"{name} " if name else "window "
