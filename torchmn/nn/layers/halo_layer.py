"""HaloLayer: the base class of users' layers of windows of images, which run on one rank and on tiles of a grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from torchmn.context import here
from torchmn.errors import ArgumentError
from torchmn.geometry import Interval, Window
from torchmn.gradient_role import count_at_parameter, role_of
from torchmn.sharded import parameter_use
from torchmn.sharded.redistribute import gathered, replicated_operand
from torchmn.sharded.refusals import refuse
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.sharded.windows import plan_windows, windowed

_TORCH_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class HaloLayer(nn.Module):
    """Base class of a layer each of whose outputs depends on a window of the image.

    A subclass sets `windows` and defines `local`. Under halopar, `local` computes this rank's tile with its halo; on
    one rank the padded image. Parameters are replicated, and their gradients are summed over the tiles.

    Attributes:
        windows: one `torchmn.geometry.Window` per image dim: kernel, stride, padding, dilation.
        fill: the value of zero padding, for example -inf for a maximum.
        padding_mode: "zeros", "reflect", "replicate" or "circular".
    """

    windows: Sequence[Window]
    fill: float = 0.0
    padding_mode: str = "zeros"

    def local(self, x: Tensor) -> Tensor:
        """Returns the outputs whose windows are fully inside of `x`. To be defined by the subclass.

        Args:
            x: (batch, channel, *image), an image or tile with halo and padding.

        Returns:
            A tensor (batch, channel, *outputs).
        """
        raise NotImplementedError(f"{type(self).__name__} must define local(x)")

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs for x: (batch, channel, *image), sharded if `x` is an image in tiles.

        Args:
            x: (batch, channel, *image), whole or an image in tiles.

        Returns:
            A tensor (batch, channel, *image).

        Raises:
            ParallelizeError: if `local` returns another shape than the windows imply, or the layer's parameters are
                used in a way that is not supported.
        """
        if not isinstance(x, ShardedTensor) or not x.spec.is_tile:
            return self.local(self._padded(gathered(x)))
        layout, windows = x.spec, self._checked_windows()
        self._note_parameters(x)
        plan = plan_windows(layout, windows, padding_mode=self.padding_mode)
        if 0 in plan.result.local_shape():  # `local` is not called here, so it cannot give the number of channels
            plan = plan_windows(layout, windows, self.out_channels(layout.shape[1]), self.padding_mode)
        with parameter_use.inside_shard():
            y = windowed(x, plan, self.local, *self.parameters(), fill=self.fill)
        shape = tuple(local(y).shape)
        result = plan_windows(layout, windows, shape[1], self.padding_mode).result
        if shape != result.local_shape():
            refuse(f"{type(self).__name__}.local returned {shape}, expected {result.local_shape()} by its windows")
        return wrap(local(y), result)

    def out_channels(self, in_channels: int) -> int:
        """Returns the number of channels of the outputs; to be overridden if it is not that of the input."""
        return in_channels

    def _checked_windows(self) -> tuple[Window, ...]:
        windows = tuple(self.windows)
        if any(window.transposed for window in windows):
            raise ArgumentError(
                f"{type(self).__name__}: expected windows of the input of a HaloLayer, got transposed ones. Upsample "
                "first, or use nn.ConvTranspose2d"
            )
        return windows

    def _padded(self, x: Tensor) -> Tensor:
        windows = self._checked_windows()
        around = []
        for window, extent in zip(reversed(windows), reversed(x.shape), strict=False):
            outputs = Interval(0, window.output_extent(extent, type(self).__name__))
            low, high = window.padding
            # With ceil_mode, the last window may extend beyond the padding.
            around += [low, max(high, window.needed(outputs, extent).stop - extent)]
        if not any(around):
            return x
        mode = _TORCH_MODES.get(self.padding_mode)
        if mode is None:
            modes = ", ".join(_TORCH_MODES)
            raise ArgumentError(f"{type(self).__name__}: expected a padding_mode of {modes}, got {self.padding_mode!r}")
        return F.pad(x, around, mode, self.fill if mode == "constant" else None)

    def _note_parameters(self, x: ShardedTensor) -> None:
        """Notes that the gradients of the parameters will be this rank's contributions."""
        for name, parameter in self.named_parameters():
            role = role_of(parameter)
            recorded = here.recorder is not None or role.placement == "partial" or not parameter.requires_grad
            if not recorded and x.spec.grid.tile_count > 1:
                refuse(
                    f"the parameter {name} was not used in the dry run before the first forward, which took another "
                    f"path. Run {type(self).__name__} in the first forward too"
                )
            if role.summed_in_backward:
                refuse(f"the parameter {name} is also used outside of {type(self).__name__}, which is not supported")
            count_at_parameter(parameter)
            replicated_operand(parameter, x.spec)
