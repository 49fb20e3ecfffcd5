"""Max, average and global average pooling."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import nn

from torchmn.experiment.file.fields import Extent, Padding
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, check_window, image_dims, per_dim

MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVERAGE_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
GLOBAL_POOLS = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


class Pool(Layer):
    """Base class of pooling layers."""

    shorthand: ClassVar[str | None] = "kernel"

    kernel: Extent = Field(description="size of the window, such as 2 or [3, 2]")
    stride: Extent | None = Field(None, description="distance between windows; default: the kernel")
    padding: Padding = 0
    ceil_mode: bool = False

    def window(self, shape: Shape) -> tuple[Shape, Shape, Shape]:
        """Returns kernel, stride and padding; raises a ValueError if they do not fit samples of this shape."""
        dims = image_dims(self.kind, shape)
        kernel, padding = per_dim(self.kernel, dims, "kernel"), per_dim(self.padding, dims, "padding")
        check_window(shape[1:], kernel, padding)
        if any(2 * p > k for k, p in zip(kernel, padding, strict=True)):
            raise ValueError(f"padding {self.padding} is more than half the kernel {self.kernel}")
        stride = kernel if self.stride is None else per_dim(self.stride, dims, "stride")
        return kernel, stride, padding


@register_layer("max_pool")
class MaxPool(Pool):
    """The maximum of each window."""

    def build(self, shape: Shape) -> nn.Module:
        window = self.window(shape)  # checks the shape
        return MAX_POOLS[len(shape) - 1](*window, ceil_mode=self.ceil_mode)


@register_layer("avg_pool", "mean_pool")
class AveragePool(Pool):
    """The mean of each window."""

    def build(self, shape: Shape) -> nn.Module:
        window = self.window(shape)
        return AVERAGE_POOLS[len(shape) - 1](*window, ceil_mode=self.ceil_mode)


@register_layer("global_avg_pool")
class GlobalAveragePool(Layer):
    """The mean of each map."""

    def build(self, shape: Shape) -> nn.Module:
        return GLOBAL_POOLS[image_dims(self.kind, shape)](1)
