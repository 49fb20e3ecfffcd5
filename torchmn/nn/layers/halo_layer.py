"""HaloLayer: the base class of layers over windows of images, that run on one rank and on tiles of a grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from torchmn.context import here
from torchmn.errors import ArgumentError
from torchmn.geometry import Interval, Window
from torchmn.gradient_role import count_at_parameter, role_of
from torchmn.sharded import roles
from torchmn.sharded.redistribute import entering, whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.sharded.windows import plan_windows, windowed

_TORCH_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class HaloLayer(nn.Module):
    """A layer of your own whose outputs each see a window of the image; it says which, and computes what it sees.

    windows: one `torchmn.geometry.Window` per image dim: kernel, stride, padding, dilation
    fill, padding_mode: what lies beyond the image

    `local(x)` gets (batch, channel, *image) in which halo and padding are there already, and computes the outputs
    whose windows lie fully inside it. Under halopar it gets this rank's tile with its halo; on one rank the padded
    image. Its parameters are replicated, and their gradients summed over the tiles.
    """

    windows: Sequence[Window]
    fill: float = 0.0
    padding_mode: str = "zeros"

    def local(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define local(x)")

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, ShardedTensor) or not x.spec.is_tile:
            return self.local(self._padded(whole(x) if isinstance(x, ShardedTensor) else x))
        layout, windows = x.spec, self._checked_windows()
        self._note_parameters(x)
        plan = plan_windows(layout, windows, padding_mode=self.padding_mode)
        if 0 in plan.result.local_shape():  # its channels must be those of the others, though it computes nothing
            plan = plan_windows(layout, windows, self.out_channels(layout.shape[1]), self.padding_mode)
        with roles.inside_a_part():
            y = windowed(x, plan, self.local, *self.parameters(), fill=self.fill)
        mine = local(y).shape
        result = plan_windows(layout, windows, mine[1], self.padding_mode).result
        if tuple(mine) != result.local_shape():
            refuse(f"{type(self).__name__}.local made {tuple(mine)}, expected {result.local_shape()} by its windows")
        return wrap(local(y), result)

    def out_channels(self, in_channels: int) -> int:
        """How many channels `local` makes; override it where they are not those of the input."""
        return in_channels

    def _checked_windows(self) -> tuple[Window, ...]:
        windows = tuple(self.windows)
        if any(window.transposed for window in windows):
            raise ArgumentError(
                f"{type(self).__name__}: a HaloLayer's outputs see windows of its input, so its windows can not be "
                "transposed. Upsample first, or use nn.ConvTranspose2d"
            )
        return windows

    def _padded(self, x: Tensor) -> Tensor:
        windows = self._checked_windows()
        around = []
        for window, extent in zip(reversed(windows), reversed(x.shape), strict=False):
            outputs = Interval(0, window.output_extent(extent, type(self).__name__))
            low, high = window.padding
            # A last window that is not full, as ceil_mode allows, sees more than the padding.
            around += [low, max(high, window.needed(outputs, extent).stop - extent)]
        if not any(around):
            return x
        mode = _TORCH_MODES.get(self.padding_mode)
        if mode is None:
            raise ArgumentError(f"{type(self).__name__}: padding_mode {self.padding_mode!r} is not known")
        return F.pad(x, around, mode, self.fill if mode == "constant" else None)

    def _note_parameters(self, x: ShardedTensor) -> None:
        """Their gradients will be this rank's share."""
        for name, parameter in self.named_parameters():
            role = role_of(parameter)
            seen = here.recorder is not None or role.placement == "partial" or not parameter.requires_grad
            if not seen and x.spec.grid.tile_count > 1:
                refuse(
                    f"the parameter {name} is used in a way that the run without values has not seen: forward took "
                    f"another way then. Let {type(self).__name__} run in the first forward, too"
                )
            if role.summed_in_backward:
                refuse(f"the parameter {name} is used outside of {type(self).__name__}, too, which is not supported")
            count_at_parameter(parameter)
            entering(parameter, x.spec)
