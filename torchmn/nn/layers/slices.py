"""Modules of which every rank holds slices of the parameters: between slices and the global tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchmn._torch_compat import made_like, metadata_of, own_parameters
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError

# Of one parameter: the dim that is cut, and which global indices along it a tile rank holds (None: this one).
Slice = tuple[int, Callable[[int | None], Tensor]]

Sliced = TypeVar("Sliced", bound="SlicedModule")

_OF_TILE = "torchmn_slices_of"  # in the metadata of a state dict: whose slices it holds


class SlicedModule(nn.Module):
    """A module some of whose parameters are slices along one dim. A global tensor can be loaded into it by its key."""

    grid: ProcessGrid
    cut_parameters: dict[str, Slice]

    @classmethod
    def in_place_of(cls: type[Sliced], layer: nn.Module, grid: ProcessGrid) -> Sliced:
        """Returns a module of this class with the attributes, buffers and hooks of `layer`, without parameters yet."""
        made = made_like(layer, cls)
        made.grid = grid
        return made

    @torch.no_grad()
    def take_from(self, layer: nn.Module) -> None:
        """Take over this rank's slices of the parameters of `layer`, which has the global ones."""
        for name, theirs in layer.named_parameters(recurse=False):
            mine = self.get_parameter(name)
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

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = metadata_of(destination)
        if metadata is not None:  # travels with the state dict, through torch.save too
            metadata.setdefault(prefix[:-1], {})[_OF_TILE] = self._tile()

    def _tile(self) -> str:
        return f"tile rank {self.grid.tiles.rank} of {self.grid.tiles.size}"

    def _refuse_slices_of_others(self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        """An error if `state_dict` holds the slices of another rank, which may have the shape of this rank's."""
        theirs, own = metadata.get(_OF_TILE, self._tile()), own_parameters(self)
        held = [prefix + name for name in self.cut_parameters if prefix + name in state_dict and own[name] is not None]
        if held and theirs != self._tile():
            raise ParallelizeError(
                f"load_state_dict: {', '.join(held)} are the slices of {theirs}, and this is {self._tile()}. Save "
                "torchmn.full_state_dict(model), which every rank calls: it holds global tensors, of which each rank "
                "takes its own part"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._refuse_slices_of_others(state_dict, prefix, args[0])
        for name in self.cut_parameters:
            mine, given = own_parameters(self)[name], state_dict.get(prefix + name)
            if mine is not None and given is not None and self._is_global(name, mine, given):
                state_dict[prefix + name] = self.sliced(name, given)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[arg-type]

    def _is_global(self, name: str, mine: Tensor, given: Tensor) -> bool:
        """Whether `given`, in a state dict, is the global tensor of which this rank holds the slice `mine`."""
        dim, share = self.cut_parameters[name]
        total = sum(len(share(tile)) for tile in range(self.grid.tiles.size))
        return given.shape != mine.shape and given.dim() == mine.dim() and given.shape[dim] == total
