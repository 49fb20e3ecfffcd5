"""TiledLocalFilter2d: this rank's filters of a LocalFilter2d over the tiles of a grid."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchmn._torch_compat import DisableTorchFunction, own_parameters
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.functions.global_array import GlobalArray
from torchmn.geometry import Window, all_owned
from torchmn.nn.batch_last import batch_last, halo_of, in_order_of, sum_of_halos
from torchmn.nn.local_filter import LocalFilter2d, maps_last
from torchmn.nn.slices import SlicedModule
from torchmn.sharded.refusals import refuse
from torchmn.sharded.sharding import Sharding, image_layout
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.sharded.windows import nothing

Box = tuple[slice, slice]


class TiledLocalFilter2d(SlicedModule, LocalFilter2d):
    """`LocalFilter2d` of which this rank holds the filters of its own outputs. They never travel.

    weight: (own rows, own columns, out_maps, in_maps, kernel height, kernel width). `forward` fetches the halo of the
    images; `transpose` adds what it decodes into neighbours' tiles to them, and gets back what they decode into its
    own.
    """

    array: GlobalArray

    @staticmethod
    def of(layer: LocalFilter2d, grid: ProcessGrid) -> TiledLocalFilter2d:
        """This rank's filters of `layer`."""
        made: Any = TiledLocalFilter2d.in_place_of(layer, grid)
        windows = [
            Window(kernel, stride, (padding, padding))
            for kernel, stride, padding in zip(layer.kernel, layer.stride, layer.padding, strict=True)
        ]
        made.array = GlobalArray(grid, layer.in_size, windows, name="LocalFilter2d")
        made.cut_parameters = dict.fromkeys(name for name, _ in layer.named_parameters(recurse=False))
        for name, whole in own_parameters(layer).items():
            mine = None if whole is None else nn.Parameter(made.sliced(name, whole.detach()), whole.requires_grad)
            made.register_parameter(name, mine)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of the outputs, from the sharded images."""
        self.check_shape(x, "forward", (self.in_maps, *self.in_size))
        mine, layout = self._opened(x, "forward")
        result = image_layout(self.grid, (mine.shape[0], self.out_maps, *self.out_size), layout.samples, layout.learned)
        with DisableTorchFunction():
            buffer = self.fetched(mine)
            if self.weight.numel() == 0:
                return wrap(nothing(result.local_shape(), buffer, self.weight, self.bias), result)
            return wrap(_as(mine, self.local(buffer)), result)

    def transpose(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """This rank's part of the decoded images, from the sharded outputs."""
        self.check_shape(y, "transpose", (self.out_maps, *self.out_size))
        (mine, layout), decoder = self._opened(y, "transpose"), self.decoding_weight(weight)
        result = image_layout(self.grid, (mine.shape[0], self.in_maps, *self.in_size), layout.samples, layout.learned)
        with DisableTorchFunction():
            if decoder.numel() == 0:
                image = nothing((mine.shape[0], self.in_maps, *self.array.plan.buffer_shape), mine, decoder)
            else:
                height, width = self.array.plan.buffer_shape
                image = self.local_transpose(mine, (height, width), decoder)
            return wrap(_as(mine, sum_of_halos(image, self.array.plan, self.grid.tiles)), result)

    def fetched(self, mine: Tensor) -> Tensor:
        """This rank's tile of the images with its halo and padding, in memory with the batch last."""
        return halo_of(mine, self.array.plan, self.grid.tiles)

    def sliced(self, name: str, whole: Tensor) -> Tensor:
        """This rank's filters, as memory of their own, of those of all positions."""
        mine = whole[self._boxes()[self.grid.tiles.rank]].clone()
        return mine if name == "bias" else maps_last(mine)

    def gathered(self, name: str, mine: Tensor) -> Tensor:
        """The filters of all positions; every rank of `grid.tiles` must call it."""
        whole = mine.new_empty((*self.out_size, *mine.shape[2:]))
        for box, part in zip(self._boxes(), self.grid.tiles.allgather(mine), strict=True):
            whole[box] = part.to(mine.device)
        return whole

    def _is_global(self, name: str, mine: Tensor, given: Tensor) -> bool:
        return tuple(given.shape[:2]) == self.out_size

    def _opened(self, x: Tensor, operation: str) -> tuple[Tensor, Sharding]:
        """What this rank holds of a ShardedTensor, and how the whole is cut."""
        if not isinstance(x, ShardedTensor):
            refuse(
                f"LocalFilter2d.{operation} holds the filters of one tile: expected a ShardedTensor, got a whole tensor"
            )
        return local(x), x.spec

    def _hint(self) -> str:
        shape = self.in_maps, *self.in_size
        return f" If each rank passed whole images, not tiles: parallelize(..., input_shape={shape}) tells them apart."

    def _boxes(self) -> list[Box]:
        """The output positions of each rank of `grid.tiles`, row by row."""
        rows, columns = (all_owned(n, p) for n, p in zip(self.out_size, self.grid.parts_of(2), strict=True))
        return [(row.as_slice(), column.as_slice()) for row in rows for column in columns]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {tuple(self.weight.shape[:2])} of {self.out_size} positions here"


def _as(x: Tensor, y: Tensor) -> Tensor:
    """`y` in the order in memory of `x`."""
    return in_order_of(x, batch_last(y))
