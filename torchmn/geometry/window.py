"""Window: the kernel, stride, padding and dilation of a layer along one dim, and the inputs that its outputs need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torchmn.errors import HaloError
from torchmn.geometry.interval import Interval


@dataclass(frozen=True)
class Window:
    """Kernel, stride, padding and dilation of a convolution or a pooling layer along one dim.

    Attributes:
        kernel: number of taps, at least 1.
        stride: at least 1.
        padding: (low, high); an int is used for both ends. A negative number crops the image.
        dilation: distance of two taps, at least 1.
        ceil_mode: whether a last window that is not full has an output, as in torch's pooling layers.
        transposed: whether this is a transposed convolution.
        output_padding: of a transposed convolution only.

    Raises:
        HaloError: for numbers that are not integers or too small.
    """

    kernel: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    dilation: int = 1
    ceil_mode: bool = False
    transposed: bool = False
    output_padding: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.padding, int):
            object.__setattr__(self, "padding", (self.padding, self.padding))
        if not _is_valid([self.kernel, self.stride, self.dilation], self.padding, self.output_padding):
            raise HaloError(
                "expected a window of whole numbers, kernel, stride and dilation at least 1, padding (low, high), got "
                f"kernel {self.kernel!r}, stride {self.stride!r}, padding {self.padding!r}, "
                f"dilation {self.dilation!r}, output_padding {self.output_padding!r}"
            )

    @property
    def span(self) -> int:
        """How many indices the kernel covers, from its first tap to its last."""
        return self.dilation * (self.kernel - 1) + 1

    def output_extent(self, extent: int, name: str | None = None) -> int:
        """Returns the number of outputs, by torch's formulas.

        Args:
            extent: length of the input along this dim.
            name: of the module, for the error message.

        Returns:
            The number of outputs along this dim.

        Raises:
            HaloError: if there are no outputs.
        """
        low, high = self.padding
        if self.transposed:
            outputs = (extent - 1) * self.stride - low - high + self.span + self.output_padding if extent else 0
        else:
            room = extent + low + high - self.span
            outputs = (-(-room // self.stride) if self.ceil_mode else room // self.stride) + 1
            # As torch: a window that starts behind the image and its lower padding has no output.
            if self.ceil_mode and (outputs - 1) * self.stride >= extent + low:
                outputs -= 1
        if outputs < 1:
            raise HaloError(
                f"{named(name)}({self}) has no output for an image of {extent} along this dim: the image is smaller "
                "than the window. Use a smaller kernel, more padding, or a larger image."
            )
        return outputs

    def needed(self, outputs: Interval, extent: int) -> Interval:
        """Returns the inputs that `outputs` depend on; those outside of 0..extent-1 are padding.

        Args:
            outputs: indices of outputs. If empty, the result is empty.
            extent: length of the input along this dim.

        Returns:
            The interval of inputs, whose ends may be outside of the image.
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


def _is_valid(positive: list[Any], padding: Any, output_padding: Any) -> bool:
    if not all(isinstance(number, int) and number >= 1 for number in positive):
        return False
    numbers = [*cast("tuple[Any, ...]", padding), output_padding] if isinstance(padding, tuple) else []
    return len(numbers) == 3 and all(isinstance(number, int) for number in numbers)


def named(name: str | None) -> str:
    """Returns the beginning of an error message: `name`, or "window" for a module without one, and a space."""
    return f"{name} " if name else "window "
