"""Buffers that a model fills itself: what it computes of one rank's samples along 'data' is not what one rank has."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchmn._torch_compat import persistent_buffers
from torchmn.communicators.communicator import Communicator
from torchmn.errors import MismatchError
from torchmn.parallel.events import Output, guard

_FORWARDS = 2  # so many are followed by a comparison: what differs does so from the first on
_ALIKE = 1e-6  # relative: ranks may differ in their last digits


@guard(
    on="output",
    why="a buffer that a layer computes of one rank's samples is not what one rank computes of the whole batch",
)
def own_averages(seen: Output) -> None:
    """Compares what the first forwards leave in buffers, along data, where ranks have samples of their own."""
    counts, replicas = seen.parallelism.looks, seen.parallelism.grid.replicas
    if seen.model.training and counts["own_averages"] < _FORWARDS:
        counts["own_averages"] += 1
        if replicas.size > 1:
            _compare_buffers(replicas, seen.model)


def _compare_buffers(comm: Communicator, model: nn.Module) -> None:
    """MismatchError on every rank if buffers of the state dict are not the same on all ranks of `comm`."""
    named = [(name, b) for name, b in _saved_buffers(model) if b.numel() and not b.is_complex()]
    if not named:
        return
    numbers = tuple([_numbers(buffer) for _, buffer in named])
    told = comm.agree("buffers of a parallel model", differ=numbers, optional=True)
    everyone = torch.tensor(told, dtype=torch.float64)
    spread = (everyone.amax(0) - everyone.amin(0)).amax(1)
    odd = spread > _ALIKE * everyone[:, :, 1].amax(0)  # never for NaN, which may come to all
    if odd.any():
        names = ", ".join(name for (name, _), is_odd in zip(named, odd.tolist(), strict=True) if is_odd)
        raise MismatchError(
            f"rank {comm.rank} of {comm.size} along 'data': after a forward in training ranks differ in the buffers "
            f"{names}: they were computed of this rank's samples alone, not of the whole batch. Batch normalisation "
            "knows; in a layer of your own take the mean over ranks, comm.allreduce(x, 'mean'), use a grid without the "
            "axis data, or register_buffer(..., persistent=False) what may be a rank's own"
        )


def _saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in persistent_buffers(module)
    ]


def _numbers(x: Tensor) -> tuple[float, float]:
    """Two numbers that stand for all values."""
    values = x.detach().flatten().double().cpu()
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64).cos()
    return (values @ weights).item(), values.norm().item()
