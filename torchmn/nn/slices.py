"""Modules of which every rank holds slices of the parameters: between slices and the global tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.communicators.process_grid import ProcessGrid

# Of one parameter: the dim that is cut, and which global indices along it a tile rank holds (None: this one).
Slice = tuple[int, Callable[[int | None], Tensor]]


class SlicedModule(nn.Module):
    """A module some of whose parameters are slices along one dim. A global tensor can be loaded into it by its key."""

    grid: ProcessGrid
    cut_parameters: dict[str, Slice]

    @torch.no_grad()
    def take_from(self, layer: nn.Module) -> None:
        """Take over this rank's slices of the parameters of `layer`, which has the global ones."""
        for name, theirs in layer.named_parameters(recurse=False):
            mine = self._parameters[name]
            assert mine is not None
            mine.copy_(self.sliced(name, theirs))
            mine.requires_grad_(theirs.requires_grad)
        self.train(layer.training)

    def sliced(self, name: str, whole: Tensor) -> Tensor:
        """This rank's slice of a global parameter."""
        if name not in self.cut_parameters:
            return whole
        dim, share = self.cut_parameters[name]
        return whole.index_select(dim, share(None).to(whole.device))

    def gathered(self, name: str, mine: Tensor) -> Tensor:
        """The global tensor of which every rank passes its slice; every rank of `grid.tiles` must call it."""
        if name not in self.cut_parameters:
            return mine
        dim, share = self.cut_parameters[name]
        parts = self.grid.tiles.allgather(mine)
        indices = [share(tile) for tile in range(len(parts))]
        shape = list(mine.shape)
        shape[dim] = sum(len(part) for part in indices)
        whole = mine.new_empty(shape)
        for part, index in zip(parts, indices, strict=True):
            whole.index_copy_(dim, index.to(mine.device), part.to(mine.device))
        return whole

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.cut_parameters:
            mine, given = self._parameters[name], state_dict.get(prefix + name)
            if mine is not None and given is not None and given.shape != mine.shape:
                dim, share = self.cut_parameters[name]
                total = sum(len(share(tile)) for tile in range(self.grid.tiles.size))
                if given.dim() == mine.dim() and given.shape[dim] == total:
                    state_dict[prefix + name] = self.sliced(name, given)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[arg-type]
