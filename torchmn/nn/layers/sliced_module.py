"""SlicedModule: base class of layers of whose parameters every rank holds a slice of a global tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchmn._torch_compat import made_like, metadata_of, own_parameters
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError

# Of one parameter: the dim that is cut, and a function that returns the global indices along it that a rank of
# `grid.tiles` holds; this rank's for None.
ParameterSlice = tuple[int, Callable[[int | None], Tensor]]

Sliced = TypeVar("Sliced", bound="SlicedModule")

_OF_TILE = "torchmn_slices_of"  # key in the metadata of a state dict: the rank whose slices it holds


class SlicedModule(nn.Module):
    """A module some of whose parameters are slices of global ones. `load_state_dict` takes slices and global tensors.

    Attributes:
        grid: the slices are those of the ranks of `grid.tiles`.
        sliced_parameters: by name, how a parameter is cut.
    """

    grid: ProcessGrid
    sliced_parameters: dict[str, ParameterSlice]

    @classmethod
    def in_place_of(cls: type[Sliced], layer: nn.Module, grid: ProcessGrid) -> Sliced:
        """Returns a module of this class with the attributes, buffers and hooks of `layer`, without parameters."""
        made = made_like(layer, cls)
        made.grid = grid
        return made

    @torch.no_grad()
    def copy_from(self, layer: nn.Module) -> None:
        """Copies this rank's slices of the global parameters of `layer`."""
        for name, whole in layer.named_parameters(recurse=False):
            parameter = self.get_parameter(name)
            parameter.copy_(self.sliced(name, whole))
            parameter.requires_grad_(whole.requires_grad)
        self.train(layer.training)

    def sliced(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's slice of a global parameter, or of a tensor of its shape."""
        if name not in self.sliced_parameters:
            return whole
        dim, indices_of = self.sliced_parameters[name]
        return whole.index_select(dim, indices_of(None).to(whole.device))

    def gathered(self, name: str, slice_: Tensor) -> Tensor:
        """Returns the global tensor of which every rank passes its slice. All ranks of `grid.tiles` must call it."""
        if name not in self.sliced_parameters:
            return slice_
        dim, indices_of = self.sliced_parameters[name]
        slices = self.grid.tiles.allgather(slice_)
        indices = [indices_of(tile) for tile in range(len(slices))]
        shape = list(slice_.shape)
        shape[dim] = sum(map(len, indices))
        whole = slice_.new_empty(shape)
        for part, index in zip(slices, indices, strict=True):
            whole.index_copy_(dim, index.to(slice_.device), part.to(slice_.device))
        return whole

    def global_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a global parameter."""
        shape = list(self.get_parameter(name).shape)
        if name in self.sliced_parameters:
            dim, indices_of = self.sliced_parameters[name]
            shape[dim] = sum(len(indices_of(tile)) for tile in range(self.grid.tiles.size))
        return tuple(shape)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = metadata_of(destination)
        if metadata is not None:  # torch.save keeps it with the state dict
            metadata.setdefault(prefix[:-1], {})[_OF_TILE] = self._tile()

    def _tile(self) -> str:
        return f"tile rank {self.grid.tiles.rank} of {self.grid.tiles.size}"

    def _refuse_slices_of_others(self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        """Raises an error if `state_dict` holds the slices of another rank, which may have the shape of this rank's."""
        saved_by, own = metadata.get(_OF_TILE, self._tile()), own_parameters(self)
        held = [
            prefix + name for name in self.sliced_parameters if prefix + name in state_dict and own[name] is not None
        ]
        if held and saved_by != self._tile():
            raise ParallelizeError(
                f"load_state_dict: {', '.join(held)} are the slices of {saved_by}, and this is {self._tile()}. Save "
                "torchmn.full_state_dict(model), which every rank must call: it holds global tensors, of which each "
                "rank loads its slices"
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._refuse_slices_of_others(state_dict, prefix, args[0])
        for name in self.sliced_parameters:
            parameter, loaded = own_parameters(self)[name], state_dict.get(prefix + name)
            if parameter is not None and loaded is not None and self._is_global(name, parameter, loaded):
                state_dict[prefix + name] = self.sliced(name, loaded)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _is_global(self, name: str, parameter: Tensor, loaded: Tensor) -> bool:
        """Whether `loaded`, from a state dict, is the global tensor of which `parameter` is a slice."""
        dim = self.sliced_parameters[name][0]
        if loaded.shape == parameter.shape or loaded.dim() != parameter.dim():
            return False
        return loaded.shape[dim] == self.global_shape(name)[dim]
