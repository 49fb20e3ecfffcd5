"""GlobalArray: an image that lies in tiles on many ranks, seen through a window."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid, checked_grid
from torchmn.errors import HaloError
from torchmn.functions.halo.exchange import halo_exchange, halo_scatter_add
from torchmn.geometry import DimPlan, HaloPlan, Interval, Window, all_owned


class GlobalArray:
    """An image of `global_shape` cut over the grid: what this rank owns, what its window needs, and the exchange.

    grid: a ProcessGrid, or a communicator: then the squarest grid of its ranks
    global_shape: of the whole image, one to three dims, as (height, width)
    window: one for all dims, or one per dim
    padding_mode: how what lies beyond the image is filled: "zeros" (with `fill`), "reflect", "replicate", "circular"
    name: the layer's, for error messages

    A layer of one's own is then: view, compute as if padding were 0, done:

        array = GlobalArray(grid, (height, width), Window(3, padding=(1, 1)))
        y = F.conv2d(array.get_fprop_view(x), weight)       # this rank's tile of the whole output
    """

    def __init__(
        self,
        grid: ProcessGrid | Communicator,
        global_shape: Sequence[int],
        window: Window | Sequence[Window],
        *,
        padding_mode: str = "zeros",
        fill: float = 0.0,
        name: str | None = None,
    ):
        self.grid = checked_grid(grid, "GlobalArray")
        self.global_shape = tuple(global_shape)
        dims = len(self.global_shape)
        self.windows = (window,) * dims if isinstance(window, Window) else tuple(window)
        if len(self.windows) != dims:
            raise HaloError(f"expected a window for each dim of {self.global_shape}, got {len(self.windows)}")
        self.fill = fill
        parts, place = self.grid.parts_of(dims), self.grid.place_of(dims)
        each = zip(self.global_shape, parts, self.windows, strict=True)
        plans = tuple(DimPlan.of_window(extent, n, view, padding_mode, name) for extent, n, view in each)
        self.plan = HaloPlan.of(plans, place)
        outputs = [view.output_extent(extent) for extent, view in zip(self.global_shape, self.windows, strict=True)]
        self.output_shape = tuple(outputs)
        self.owned = tuple(dim.owned[at] for dim, at in zip(plans, place, strict=True))
        self.owned_outputs: tuple[Interval, ...] = tuple(
            all_owned(extent, n)[at] for extent, n, at in zip(outputs, parts, place, strict=True)
        )

    def tile(self, whole: Tensor) -> Tensor:
        """This rank's tile of a whole image: a view of its last dims."""
        return whole[(..., *(interval.as_slice() for interval in self.owned))]

    def get_fprop_view(self, x: Tensor) -> Tensor:
        """All that this rank's outputs need: its tile `x`, its neighbours' halos, padding. Differentiable."""
        return halo_exchange(x, self.plan, self.grid.tiles, self.fill)

    def get_bprop_view(self, g: Tensor) -> Tensor:
        """The adjoint of `get_fprop_view`: the gradient of this rank's tile, from all ranks whose view holds it."""
        return halo_scatter_add(g, self.plan, self.grid.tiles)

    def __repr__(self) -> str:
        image = " x ".join(map(str, self.global_shape))
        mine = ", ".join(map(str, self.owned))
        return f"<GlobalArray {image} on {self.grid!r}: this rank owns [{mine}]>"
