"""The inputs of a parallel model's forward: what is found in them, and what ranks compare of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchmn.communicators import wire
from torchmn.communicators.digests import checksum_of
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.geometry import owned
from torchmn.sharded.sharding import Samples, Sharding
from torchmn.sharded.tensor import ShardedTensor, local, wrap

# The values of whole inputs are compared up to here: ranks that shuffle differently differ from the first sample on.
_COMPARED_BYTES = 1 << 20


def are_only_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call has the plainest form, as most have: tensors, one after the other."""
    return not kwargs and all(isinstance(x, Tensor) for x in args)


def tensors_in(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """All tensors of a call, however deep they lie."""
    if are_only_tensors(args, kwargs):
        return list(args)
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def check_others(args: tuple, kwargs: dict[str, Any]) -> None:
    """An error if an image is where it can not be seen: the model would take a tile for the whole."""
    for x in pytree.tree_leaves((args, kwargs)):
        hidden = [value for value in getattr(x, "__dict__", {}).values() if isinstance(value, Tensor | np.ndarray)]
        if isinstance(x, np.ndarray) or (hidden and not isinstance(x, Tensor)):
            raise ParallelizeError(
                f"forward of a parallel model: expected images as tensors, alone or in tuples, lists and dicts, got "
                f"{type(x).__name__}, in which they can not be seen and cut"
            )


def without_values(x: Tensor) -> Tensor:
    """A tensor, or part of one, that looks like `x`."""
    if isinstance(x, ShardedTensor):
        return wrap(torch.empty_like(local(x), device="meta").requires_grad_(x.requires_grad), x.spec)
    return torch.empty_like(x, device="meta").requires_grad_(x.requires_grad)


def comparable(x: Tensor) -> tuple[Any, ...]:
    """What ranks compare of a tensor that all of them have: its looks, and a number for its values."""
    values = wire.as_bytes(x.detach().cpu().contiguous())[:_COMPARED_BYTES]
    return (*x.shape, x.dtype, x.requires_grad, checksum_of(values))


def whole_shape(grid: ProcessGrid, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The global shape of an input of which the tile ranks hold `shapes`; an error if these do not fit together."""
    first = shapes[0]
    axes = grid.axes_of(len(first) - 2)
    shape = list(first)
    layout = Sharding(grid, first, (None,) * len(first), Samples(0, first[0]))
    for dim, axis in enumerate(axes, start=2):
        along = {layout.place(axis, tile): part[dim] for tile, part in enumerate(shapes) if len(part) == len(first)}
        shape[dim] = sum(along.values())
    expected = [
        (
            *first[:2],
            *(
                len(owned(shape[dim], grid.sizes[axis], layout.place(axis, tile)))
                for dim, axis in enumerate(axes, start=2)
            ),
        )
        for tile in range(len(shapes))
    ]
    if expected != shapes:
        raise ParallelizeError(
            f"rank {grid.comm.rank} of {grid.comm.size}: the ranks' tiles have shapes {shapes}, expected {expected} "
            f"for an input {tuple(shape)}: balanced, larger tiles first. torchmn.data.scatter_regions cuts them so."
        )
    return tuple(shape)
