"""VectorLinear: this rank's share of a Linear layer whose input or output vector is cut over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ArgumentError
from torchmn.nn.layers.slices import SlicedModule
from torchmn.sharded.redistribute import own_columns, part_of, whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.replicated import enter_parts, sum_of_parts
from torchmn.sharded.sharding import AnyCut, Cut, FlatCut, Sharding, samples_now
from torchmn.sharded.tensor import ShardedTensor, local, wrap


class VectorLinear(SlicedModule, nn.Linear):
    """`nn.Linear` of global size `in_features` x `out_features`, of which this rank holds a share.

    split="input": this rank has the columns of its part of the input. The ranks' products are summed, so the output
        is whole on every rank. The input may be whole (each rank takes its part), or cut already: then nothing is
        gathered. `columns` says how the input is cut if not in balanced intervals, as after halo layers.
    split="output": this rank has the rows of its part of the output, which stays cut. The input is whole.

    A Linear whose output feeds, element by element, into another is split by output and the other one by input:
    between the two nothing travels.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        grid: ProcessGrid,
        split: str,
        bias: bool = True,
        columns: Cut | FlatCut | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        nn.Module.__init__(self)
        if split not in ("input", "output"):
            raise ArgumentError(f"VectorLinear: expected split to be 'input' or 'output', got {split!r}")
        self.in_features, self.out_features, self.split, self.grid = in_features, out_features, split, grid
        balanced = Cut.balanced("vector", out_features if split == "output" else in_features, grid.tiles.size)
        self.cut: Cut | FlatCut = balanced if columns is None else columns
        if self.cut.extent != balanced.extent:
            raise ArgumentError(
                f"VectorLinear: expected a cut of {balanced.extent} features, got one of {self.cut.extent}"
            )
        mine = self._share().numel()
        shape = (mine, in_features) if split == "output" else (out_features, mine)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        rows = mine if split == "output" else out_features
        self.register_parameter("bias", nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None)
        dim = 0 if split == "output" else 1
        self.cut_parameters = {"weight": (dim, self._share)}
        if split == "output" and bias:
            self.cut_parameters["bias"] = (0, self._share)

    @staticmethod
    def of(layer: nn.Linear, grid: ProcessGrid, split: str, columns: Cut | FlatCut | None = None) -> VectorLinear:
        """This rank's share of `layer`."""
        has_bias = layer.bias is not None
        weight = layer.weight
        made = VectorLinear(
            layer.in_features, layer.out_features, grid, split, has_bias, columns, weight.device, weight.dtype
        )
        made.take_from(layer)
        return made

    def _share(self, tile: int | None = None) -> Tensor:
        """The global features that a rank has, in its order."""
        tile = self.grid.tiles.rank if tile is None else tile
        if isinstance(self.cut, FlatCut):
            return own_columns(self._vector(1), 1, tile)
        mine = self.cut.intervals[tile]
        return torch.arange(mine.start, mine.stop)

    def _vector(self, *leading: int) -> Sharding:
        cuts: tuple[AnyCut, ...] = (*[None] * len(leading), self.cut)
        return Sharding(self.grid, (*leading, self.cut.extent), cuts, samples_now(leading[0] if leading else 1))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.shape[-1] != self.in_features:
            refuse(f"expected {self.in_features} input features, got {tuple(x.shape)}")
        if self.split == "output":
            return self._cut_output(whole(x) if isinstance(x, ShardedTensor) else x)
        mine = x if isinstance(x, ShardedTensor) else part_of(x, self._vector(*x.shape[:-1]))
        if mine.spec.cuts[-1] != self.cut:
            if not mine.spec.is_tile:
                mine = part_of(whole(mine), self._vector(*x.shape[:-1]))
            else:
                refuse(
                    f"expected an input cut as {self.cut}, got {mine.spec.cuts[-1]}. The image has not the shape "
                    "that the model was parallelized for: pass parallelize(..., input_shape=(channels, height, width))"
                )
        result = sum_of_parts(F.linear(local(mine), self.weight), self.grid.tiles)
        return result if self.bias is None else result + self.bias.to(result.dtype)  # as autocast does

    def _cut_output(self, x: Tensor) -> Tensor:
        result = F.linear(enter_parts(x, self.grid.tiles), self.weight, self.bias)
        return wrap(result, self._vector(*x.shape[:-1]))

    def extra_repr(self) -> str:
        share = tuple(self.weight.shape)
        return f"{super().extra_repr()}, split by {self.split}: {share} here, of {self.grid.tiles.size} ranks"
