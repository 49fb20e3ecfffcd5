"""Tensor parallel convolutions and embeddings: each rank holds a slice of the weights and computes some channels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn._torch_compat import own_parameters
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.geometry import Interval, owned
from torchmn.nn.layers.sliced_module import SlicedModule
from torchmn.sharded.redistribute import gathered
from torchmn.sharded.refusals import refuse
from torchmn.sharded.replicated import enter_shards, sum_over_shards
from torchmn.sharded.sharding import AnyCut, Cut, Sharding, current_samples
from torchmn.sharded.tensor import wrap


def cut_along(grid: ProcessGrid, shape: tuple[int, ...], dim: int, cut: Cut) -> Sharding:
    """Returns the sharding of a global shape with one dim cut over the ranks of `grid.tiles`."""
    cuts: list[AnyCut] = [None] * len(shape)
    cuts[dim] = cut
    return Sharding(grid, shape, tuple(cuts), current_samples(shape[0]))


class _ChannelConvolution(SlicedModule):
    """A convolution of which this rank computes some output channels, from all input channels of its groups.

    Attributes:
        groups: of this rank.
        all_groups: of the global layer.
        cut: of the output channels.
        inputs: the input channels of this rank's groups.
    """

    weight: Tensor
    bias: Tensor | None
    in_channels: int
    out_channels: int
    groups: int
    all_groups: int
    cut: Cut
    inputs: slice
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def of(cls, layer: nn.Module, grid: ProcessGrid) -> nn.Module:
        """Returns this rank's slice of `layer`, with whole groups of output channels."""
        made = cls.in_place_of(layer, grid)
        made.all_groups = made.groups
        units = made.groups if made.groups > 1 else made.out_channels
        per_unit = made.out_channels // units
        count = grid.tiles.size
        units_of_ranks = [owned(units, count, tile) for tile in range(count)]
        made.cut = Cut("vector", tuple(Interval(u.start * per_unit, u.stop * per_unit) for u in units_of_ranks))
        here = units_of_ranks[grid.tiles.rank]
        if made.all_groups > 1:
            made.groups = len(here)
        inputs = made.in_channels // made.all_groups
        made.inputs = slice(here.start * inputs, here.stop * inputs) if made.all_groups > 1 else slice(None)
        made.sliced_parameters = {name: (0, made._slice_indices) for name, p in layer.named_parameters(recurse=False)}
        for name, value in own_parameters(layer).items():
            sliced = None if value is None else nn.Parameter(made.sliced(name, value.detach()), value.requires_grad)
            made.register_parameter(name, sliced)
        return made

    def _slice_indices(self, tile: int | None) -> Tensor:
        interval = self.cut.intervals[self.grid.tiles.rank if tile is None else tile]
        return torch.arange(interval.start, interval.stop)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (batch, out channel, *image), cut along channels, from the whole x: (batch, channel, *image)."""
        entered = enter_shards(gathered(x), self.grid.tiles)[:, self.inputs]
        shard = self._conv_forward(entered, self.weight, self.bias)
        shape = (shard.shape[0], self.out_channels, *shard.shape[2:])
        return wrap(shard, cut_along(self.grid, shape, 1, self.cut))


class ChannelConv1d(_ChannelConvolution, nn.Conv1d):
    """This rank's output channels of an `nn.Conv1d`. `ChannelConv1d.of(layer, grid)` makes one."""


class ChannelConv2d(_ChannelConvolution, nn.Conv2d):
    """This rank's output channels of an `nn.Conv2d`. `ChannelConv2d.of(layer, grid)` makes one."""


class ChannelConv3d(_ChannelConvolution, nn.Conv3d):
    """This rank's output channels of an `nn.Conv3d`. `ChannelConv3d.of(layer, grid)` makes one."""


class VectorEmbedding(SlicedModule, nn.Embedding):
    """This rank's columns of an `nn.Embedding` or, if there are fewer columns than ranks, its rows.

    `VectorEmbedding.of(layer, grid)` makes one.

    Attributes:
        cut: of the columns or rows.
        by_rows: whether rows are cut.
    """

    cut: Cut
    by_rows: bool

    @staticmethod
    def of(layer: nn.Embedding, grid: ProcessGrid) -> VectorEmbedding:
        """Returns this rank's slice of `layer`."""
        made = VectorEmbedding.in_place_of(layer, grid)
        made.by_rows = layer.embedding_dim < grid.tiles.size
        extent = layer.num_embeddings if made.by_rows else layer.embedding_dim
        made.cut = Cut.balanced("vector", extent, grid.tiles.size)
        made.sliced_parameters = {"weight": (0 if made.by_rows else 1, made._slice_indices)}
        weight = nn.Parameter(made.sliced("weight", layer.weight.detach()), layer.weight.requires_grad)
        made.register_parameter("weight", weight)
        return made

    def _slice_indices(self, tile: int | None) -> Tensor:
        interval = self.cut.intervals[self.grid.tiles.rank if tile is None else tile]
        return torch.arange(interval.start, interval.stop)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns (*ids.shape, embedding_dim): cut along the last dim, or whole if rows are cut."""
        if self.by_rows:
            return self._from_rows(ids)
        shard = F.embedding(ids, self.weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse)
        return wrap(shard, cut_along(self.grid, (*ids.shape, self.embedding_dim), ids.dim(), self.cut))

    def _from_rows(self, ids: Tensor) -> Tensor:
        """Returns the sum over ranks of the embeddings of the ids that each rank holds, with zeros for the others."""
        if not ids.is_meta and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            refuse(f"expected ids in 0..{self.num_embeddings - 1}, got {int(ids.min())}..{int(ids.max())}")
        rows = self.cut.intervals[self.grid.tiles.rank]
        here = (ids >= rows.start) & (ids < rows.stop)
        learns = here if self.padding_idx is None else here & (ids != self.padding_idx)
        found = F.embedding((ids - rows.start).clamp(0, max(len(rows) - 1, 0)), self.weight)
        found = torch.where(learns.unsqueeze(-1), found, found.detach())
        return sum_over_shards(torch.where(here.unsqueeze(-1), found, found.new_zeros(())), self.grid.tiles)
