"""Layers whose channels are cut over ranks, each rank with a slice of the weights: modelpar for more than vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchmn._torch_compat import own_parameters
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.geometry import Interval, owned
from torchmn.nn.layers.slices import SlicedModule
from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.replicated import enter_parts, sum_of_parts
from torchmn.sharded.sharding import AnyCut, Cut, Sharding, samples_now
from torchmn.sharded.tensor import ShardedTensor, wrap


def cut_along(grid: ProcessGrid, shape: tuple[int, ...], dim: int, cut: Cut) -> Sharding:
    """The layout of a global shape of which one dim is cut over the ranks of `grid.tiles`."""
    cuts: list[AnyCut] = [None] * len(shape)
    cuts[dim] = cut
    return Sharding(grid, shape, tuple(cuts), samples_now(shape[0]))


class _ChannelConvolution(SlicedModule):
    """A convolution of which this rank computes some output channels, from all input channels (of its groups)."""

    weight: Tensor
    bias: Tensor | None
    in_channels: int
    out_channels: int
    groups: int
    all_groups: int  # of the global layer; `groups` are this rank's
    cut: Cut  # of the output channels
    inputs: slice  # the input channels that this rank's groups see

    @classmethod
    def of(cls, layer: nn.Module, grid: ProcessGrid) -> nn.Module:
        """This rank's slice of `layer`: whole groups of output channels."""
        made = cls.in_place_of(layer, grid)
        made.all_groups = made.groups
        units = made.groups if made.groups > 1 else made.out_channels
        per_unit = made.out_channels // units
        parts = grid.tiles.size
        shares = [owned(units, parts, tile) for tile in range(parts)]
        made.cut = Cut("vector", tuple(Interval(s.start * per_unit, s.stop * per_unit) for s in shares))
        mine = shares[grid.tiles.rank]
        if made.all_groups > 1:
            made.groups = len(mine)
        inputs = made.in_channels // made.all_groups
        made.inputs = slice(mine.start * inputs, mine.stop * inputs) if made.all_groups > 1 else slice(None)
        made.cut_parameters = {name: (0, made._share) for name, p in layer.named_parameters(recurse=False)}
        for name, parameter in own_parameters(layer).items():
            sliced = None if parameter is None else nn.Parameter(made.sliced(name, parameter.detach()))
            if sliced is not None:
                sliced.requires_grad_(parameter.requires_grad)  # type: ignore[union-attr]
            made.register_parameter(name, sliced)
        return made

    def _share(self, tile: int | None) -> Tensor:
        mine = self.cut.intervals[self.grid.tiles.rank if tile is None else tile]
        return torch.arange(mine.start, mine.stop)

    def forward(self, x: Tensor) -> Tensor:
        x = whole(x) if isinstance(x, ShardedTensor) else x
        entered = enter_parts(x, self.grid.tiles)[:, self.inputs]
        mine = self._conv_forward(entered, self.weight, self.bias)  # type: ignore[operator]
        shape = (mine.shape[0], self.out_channels, *mine.shape[2:])
        return wrap(mine, cut_along(self.grid, shape, 1, self.cut))


class ChannelConv1d(_ChannelConvolution, nn.Conv1d):  # type: ignore[misc]
    """`nn.Conv1d`, this rank's output channels of it."""


class ChannelConv2d(_ChannelConvolution, nn.Conv2d):  # type: ignore[misc]
    """`nn.Conv2d`, this rank's output channels of it."""


class ChannelConv3d(_ChannelConvolution, nn.Conv3d):  # type: ignore[misc]
    """`nn.Conv3d`, this rank's output channels of it."""


class VectorEmbedding(SlicedModule, nn.Embedding):
    """`nn.Embedding` of which this rank holds some columns or, where there are fewer columns than ranks, rows."""

    cut: Cut
    by_rows: bool

    @staticmethod
    def of(layer: nn.Embedding, grid: ProcessGrid) -> VectorEmbedding:
        made = VectorEmbedding.in_place_of(layer, grid)
        made.by_rows = layer.embedding_dim < grid.tiles.size
        extent = layer.num_embeddings if made.by_rows else layer.embedding_dim
        made.cut = Cut.balanced("vector", extent, grid.tiles.size)
        made.cut_parameters = {"weight": (0 if made.by_rows else 1, made._share)}
        weight = nn.Parameter(made.sliced("weight", layer.weight.detach()), layer.weight.requires_grad)
        made.register_parameter("weight", weight)
        return made

    def _share(self, tile: int | None) -> Tensor:
        mine = self.cut.intervals[self.grid.tiles.rank if tile is None else tile]
        return torch.arange(mine.start, mine.stop)

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        if self.by_rows:
            return self._from_rows(ids)
        mine = F.embedding(ids, self.weight, self.padding_idx, None, 2.0, self.scale_grad_by_freq, self.sparse)
        return wrap(mine, cut_along(self.grid, (*ids.shape, self.embedding_dim), ids.dim(), self.cut))

    def _from_rows(self, ids: Tensor) -> Tensor:
        """Each rank looks up the ids that it has; the sum over ranks has them all."""
        if not ids.is_meta and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            refuse(f"expected ids in 0..{self.num_embeddings - 1}, got {int(ids.min())}..{int(ids.max())}")
        mine = self.cut.intervals[self.grid.tiles.rank]
        here = (ids >= mine.start) & (ids < mine.stop)
        learns = here if self.padding_idx is None else here & (ids != self.padding_idx)
        found = F.embedding((ids - mine.start).clamp(0, max(len(mine) - 1, 0)), self.weight)
        found = torch.where(learns.unsqueeze(-1), found, found.detach())
        return sum_of_parts(torch.where(here.unsqueeze(-1), found, found.new_zeros(())), self.grid.tiles)
