"""Cutting a batch into micro-batches, and concatenating their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmn._torch_compat import BatchNorm, InstanceNorm
from torchmn.errors import GraphError
from torchmn.graph.payload import flatten, restore


def rows_if_few(inputs: tuple[Any, ...], pieces: int) -> int | None:
    """Returns the number of rows of `inputs` if it is between 1 and `pieces` - 1; else None."""
    rows = {x.shape[0] for x in flatten(inputs, keep_objects=True)[0] if x.dim()}
    return rows.pop() if len(rows) == 1 and 0 < min(rows) < pieces else None


def cut(inputs: tuple[Any, ...], pieces: int) -> list[tuple[tuple[Any, ...], int | None]]:
    """Returns `pieces` micro-batches of `inputs`, each with its number of rows (None if there is no tensor).

    Every tensor is cut along its first dim, into sizes that differ by at most one. 0-d tensors and other objects are
    in every micro-batch.
    """
    if pieces == 1:
        return [(inputs, None)]
    tensors, structure = flatten(inputs, keep_objects=True)
    batches = sorted({x.shape[0] for x in tensors if x.dim()})
    if len(batches) > 1:
        raise GraphError(
            f"microbatches={pieces}: expected tensors with one number of rows (the first dim is the batch), got "
            f"{', '.join(str(tuple(x.shape)) for x in tensors)}: pass the same number of rows in all of them"
        )
    parts = [x.tensor_split(pieces) if x.dim() else (x,) * pieces for x in tensors]
    rows: list[int | None] = [None] * pieces
    if batches:
        rows = [len(part) for part in torch.empty(batches[0], 0, device="cpu").tensor_split(pieces)]
    return [(restore(structure, iter([part[n] for part in parts])), rows[n]) for n in range(pieces)]


def concatenate(results: Sequence[tuple[Any, int | None]], component: str) -> Any:
    """Returns the result of the batch from those of its micro-batches, each with its number of rows."""
    if len(results) == 1:
        return results[0][0]
    flattened = [flatten(result, keep_objects=True) for result, _ in results]
    structures = {repr(structure) for _, structure in flattened}
    if len(structures) > 1:
        raise GraphError(
            f"{component}: expected outputs of one structure from all micro-batches, got {' and '.join(structures)}"
        )
    for (tensors, _), (_, expected) in zip(flattened, results, strict=True):
        for x in tensors:
            if x.dim() == 0 or (expected is not None and x.shape[0] != expected):
                raise GraphError(_not_a_batch(x, expected, component))
    columns = zip(*(tensors for tensors, _ in flattened), strict=True)
    return restore(flattened[0][1], iter([torch.cat(column) for column in columns]))


def _not_a_batch(x: Tensor, expected: int | None, component: str) -> str:
    rows = "the rows of its micro-batch" if expected is None else f"the {expected} rows of its micro-batch"
    return (
        f"{component}: expected {rows} in the first dim of every output, so that micro-batches can be joined, got an "
        f"output of shape {tuple(x.shape)}: compute a value of the whole batch (a mean loss) outside of the chain, "
        "make the batch the first dim, or use microbatches=1"
    )


def batch_dependent(module: nn.Module) -> list[str]:
    """Returns the layers of `module` whose results or running statistics differ between batch and micro-batches."""
    return [
        f"{name or 'the module itself'} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if _depends_on_batch(layer)
    ]


def _depends_on_batch(layer: nn.Module) -> bool:
    if isinstance(layer, InstanceNorm):
        return layer.training and layer.track_running_stats
    return isinstance(layer, BatchNorm) and (layer.training or layer.running_mean is None)
