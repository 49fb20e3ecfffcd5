"""GlobalArray: an image that is cut into tiles, with the halo exchange for one layer's window."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid, checked_grid
from torchmn.errors import HaloError
from torchmn.functions.halo.exchange import halo_exchange, halo_scatter_add
from torchmn.geometry import DimPlan, HaloPlan, Interval, Window, all_owned


class GlobalArray:
    """An image of `global_shape` that is cut into tiles over a grid, and its halo exchange for a window.

    A spatially parallel layer exchanges the halos, then computes without padding:

        array = GlobalArray(grid, (height, width), Window(3, padding=(1, 1)))
        y = F.conv2d(array.get_fprop_view(x), weight)       # this rank's tile of the whole output

    Args:
        grid: a ProcessGrid, or a communicator, for the squarest grid of its ranks.
        global_shape: of the whole image, one to three dims, as (height, width).
        window: one for all dims, or one per dim.
        padding_mode: "zeros" (filled with `fill`), "reflect", "replicate" or "circular".
        fill: value of padding in mode "zeros".
        name: of the layer, for error messages.

    Attributes:
        plan: the `HaloPlan` of this rank.
        owned: the indices of the image that this rank owns, per dim.
        output_shape: of the whole output.
        owned_outputs: the indices of the output that this rank computes, per dim.

    Raises:
        HaloError: if the image is smaller than the window, or the windows do not fit the shape.
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
        """Returns this rank's tile of a whole image, (*leading, *global_shape), as a view."""
        return whole[(..., *(interval.as_slice() for interval in self.owned))]

    def get_fprop_view(self, x: Tensor) -> Tensor:
        """Returns all elements that this rank's outputs depend on: its tile, halos of neighbours, and padding.

        Differentiable; see `torchmn.functions.halo_exchange`.

        Args:
            x: (*leading, *tile), this rank's tile.

        Returns:
            A tensor (*leading, *view), which need not be contiguous.
        """
        return halo_exchange(x, self.plan, self.grid.tiles, self.fill)

    def get_bprop_view(self, g: Tensor) -> Tensor:
        """Returns the gradient of this rank's tile, summed over all ranks whose view contains it.

        The adjoint of `get_fprop_view`; see `torchmn.functions.halo_scatter_add`.

        Args:
            g: the gradient of this rank's view, in its shape.

        Returns:
            A tensor (*leading, *tile).
        """
        return halo_scatter_add(g, self.plan, self.grid.tiles)

    def __repr__(self) -> str:
        image = " x ".join(map(str, self.global_shape))
        owned = ", ".join(map(str, self.owned))
        return f"<GlobalArray {image} on {self.grid!r}: this rank owns [{owned}]>"
