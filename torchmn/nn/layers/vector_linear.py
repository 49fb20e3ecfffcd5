"""VectorLinear: this rank's slice of a Linear layer whose input or output vector is cut over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ArgumentError
from torchmn.nn.layers.sliced_module import SlicedModule
from torchmn.sharded.redistribute import gathered, shard_of, tile_columns, whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.replicated import enter_shards, sum_over_shards
from torchmn.sharded.sharding import AnyCut, Cut, FlatCut, Sharding, current_samples
from torchmn.sharded.tensor import ShardedTensor, local, wrap


class VectorLinear(SlicedModule, nn.Linear):
    """`nn.Linear` of global size `in_features` x `out_features`, of which this rank holds a slice.

    With split="input" (row parallel in Megatron-LM), this rank has the columns of the weight for its elements of the
    input. The products are summed over ranks, so the output is whole on every rank. The input may be whole, or already
    cut, which saves an all-gather. With split="output" (column parallel), this rank has the rows of the weight for its
    elements of the output, which stays cut. The input is whole.

    If the output of one Linear is, after elementwise functions, the input of another, the first is split by output and
    the second by input, and no communication is needed between them.

    Args:
        in_features: of the global layer.
        out_features: of the global layer.
        grid: the slices are those of the ranks of `grid.tiles`.
        split: "input" or "output".
        bias: whether there is a bias; whole with split="input", sliced with split="output".
        columns: how the input is cut, if not evenly, as a flattened image in tiles.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ArgumentError: if `split` is unknown, or `columns` has another extent.
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
        features = self._slice_indices().numel()
        shape = (features, in_features) if split == "output" else (out_features, features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        rows = features if split == "output" else out_features
        self.register_parameter("bias", nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None)
        dim = 0 if split == "output" else 1
        self.sliced_parameters = {"weight": (dim, self._slice_indices)}
        if split == "output" and bias:
            self.sliced_parameters["bias"] = (0, self._slice_indices)

    @staticmethod
    def of(layer: nn.Linear, grid: ProcessGrid, split: str, columns: Cut | FlatCut | None = None) -> VectorLinear:
        """Returns this rank's slice of `layer`, with its parameters."""
        has_bias = layer.bias is not None
        weight = layer.weight
        made = VectorLinear(
            layer.in_features, layer.out_features, grid, split, has_bias, columns, weight.device, weight.dtype
        )
        made.copy_from(layer)
        return made

    def _slice_indices(self, tile: int | None = None) -> Tensor:
        """Returns the global features that a rank of `grid.tiles` has, in its order."""
        tile = self.grid.tiles.rank if tile is None else tile
        if isinstance(self.cut, FlatCut):
            return tile_columns(self._vector(1), 1, tile)
        interval = self.cut.intervals[tile]
        return torch.arange(interval.start, interval.stop)

    def _vector(self, *leading: int) -> Sharding:
        cuts: tuple[AnyCut, ...] = (*[None] * len(leading), self.cut)
        return Sharding(self.grid, (*leading, self.cut.extent), cuts, current_samples(leading[0] if leading else 1))

    def forward(self, x: Tensor) -> Tensor:
        """Returns (*, out_features) from x: (*, in_features), whole or sharded: whole, or cut with split="output".

        Args:
            x: (*, in_features), whole or sharded.

        Returns:
            A tensor (*, out_features).

        Raises:
            ParallelizeError: if the input has other features, or is a flattened image that is cut in another way.
        """
        if x.shape[-1] != self.in_features:
            refuse(f"expected {self.in_features} input features, got {tuple(x.shape)}")
        if self.split == "output":
            return self._sharded_output(gathered(x))
        shard = x if isinstance(x, ShardedTensor) else shard_of(x, self._vector(*x.shape[:-1]))
        if shard.spec.cuts[-1] != self.cut:
            if not shard.spec.is_tile:
                shard = shard_of(whole(shard), self._vector(*x.shape[:-1]))
            else:
                refuse(
                    f"expected an input cut as {self.cut}, got {shard.spec.cuts[-1]}. The image does not have the "
                    "shape that the model was parallelized for: pass parallelize(..., "
                    "input_shape=(channels, height, width))"
                )
        result = sum_over_shards(F.linear(local(shard), self.weight), self.grid.tiles)
        return result if self.bias is None else result + self.bias.to(result.dtype)  # as autocast does

    def _sharded_output(self, x: Tensor) -> Tensor:
        result = F.linear(enter_shards(x, self.grid.tiles), self.weight, self.bias)
        return wrap(result, self._vector(*x.shape[:-1]))

    def extra_repr(self) -> str:
        shape = tuple(self.weight.shape)
        return f"{super().extra_repr()}, split by {self.split}: {shape} here, of {self.grid.tiles.size} ranks"
