"""saved_as_tile: autograd saves the tile and the borders of a buffer instead of the buffer.

The buffer of a convolution is a copy of the tile with its halo. The tile is kept by the graph anyway, so only the
borders take memory until backward, which puts the buffer together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchmn._torch_compat import version_of
from torchmn.geometry import DimPlan, Interval
from torchmn.sharded.exchange import place_along
from torchmn.sharded.tensor import ShardedTensor, local


class SavedTile:
    """The tile inside of a buffer and the borders around it, from which backward rebuilds the buffer."""

    def __init__(self, tile: Tensor, buffer: Tensor, box: tuple[Interval, ...]):
        self.tile, self.version = tile.detach(), version_of(tile)
        self.shape, self.box = buffer.shape, box
        self.inner = (..., *(interval.as_slice() for interval in box))
        around = [(..., *(i.as_slice() for i in rest)) for rest in outside(buffer.shape[-len(box) :], box)]
        self.borders = [(where_, buffer.detach()[where_].clone()) for where_ in around]

    def value(self) -> Tensor:
        """Returns the buffer.

        Raises:
            RuntimeError: if the tile was changed in place since.
        """
        _check_version(self.tile, self.version)
        buffer = self.tile.new_empty(self.shape)
        buffer[self.inner] = self.tile
        for where_, border in self.borders:
            buffer[where_] = border
        return buffer


class SavedTensor:
    """A tensor that is saved as it is, with its version: torch does not check versions of tensors saved by hooks."""

    def __init__(self, x: Tensor):
        self.x, self.version = x, version_of(x)

    def value(self) -> Tensor:
        """Returns the tensor.

        Raises:
            RuntimeError: if it was changed in place since.
        """
        _check_version(self.x, self.version)
        return self.x


def _check_version(x: Tensor, version: int) -> None:
    if version_of(x) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(x.shape)} is at version {version_of(x)}; expected version {version}. Run forward again "
            "after parameters or activations were changed (an optimizer's step changes parameters)"
        )


def outside(shape: Sequence[int], box: Sequence[Interval]) -> list[tuple[Interval, ...]]:
    """Returns boxes that do not overlap and cover all of the dims `shape` outside of `box`."""
    whole = [Interval(0, extent) for extent in shape]
    found = []
    for at, (full, inner) in enumerate(zip(whole, box, strict=True)):
        for side in (Interval(0, inner.start), Interval(inner.stop, full.stop)):
            if side:
                found.append((*box[:at], side, *whole[at + 1 :]))
    return found


def saved_as_tile(x: ShardedTensor, buffer: Tensor, dims: Sequence[DimPlan]) -> AbstractContextManager[Any]:
    """Context in which autograd saves `buffer` as the tile of `x` and its borders.

    Without it, every convolution would keep a second copy of its input.

    Args:
        x: the image in tiles.
        buffer: this rank's tile of it with halo and padding.
        dims: the plans of the last dims by which the buffer was fetched.
    """
    tile, layout = local(x), x.spec
    box = []
    for number, plan in enumerate(dims):
        place = place_along(layout, len(layout.shape) - len(dims) + number)
        needed, own = plan.needed[place], plan.owned[place]
        if not own or own.start < needed.start or own.stop > needed.stop:
            # The buffer does not contain the whole tile.
            return torch.autograd.graph.saved_tensors_hooks(SavedTensor, _unpack)
        box.append(own.shift(-needed.start))
    address, shape = buffer.data_ptr(), buffer.shape

    def pack(saved: Tensor) -> SavedTensor | SavedTile:
        if saved.data_ptr() != address or saved.shape != shape or tile.data_ptr() == address:
            return SavedTensor(saved)
        return SavedTile(tile, buffer, tuple(box))

    return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)


def _unpack(packed: SavedTensor | SavedTile) -> Tensor:
    return packed.value()
