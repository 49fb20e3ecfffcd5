"""Guard: buffers that a model computes from the samples of one rank along `data`, instead of the global batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchmn._torch_compat import persistent_buffers
from torchmn.communicators.communicator import Communicator
from torchmn.errors import MismatchError
from torchmn.parallel.events import OutputEvent, guard

_FORWARDS = 2  # after which buffers are compared: if they differ, they do so from the first forward on
_TOLERANCE = 1e-6  # relative, for rounding


@guard(
    on="output",
    why="a buffer that a layer computes from this rank's samples differs from that of the global batch",
)
def buffer_averages(seen: OutputEvent) -> None:
    """Compares the buffers along `data` after the first forwards in training."""
    counts, replicas = seen.parallelism.guard_counts, seen.parallelism.grid.replicas
    if seen.model.training and counts["buffer_averages"] < _FORWARDS:
        counts["buffer_averages"] += 1
        if replicas.size > 1:
            _compare_buffers(replicas, seen.model)


def _compare_buffers(comm: Communicator, model: nn.Module) -> None:
    """Raises a MismatchError on every rank if buffers of the state dict differ between the ranks of `comm`."""
    named = [(name, b) for name, b in _saved_buffers(model) if b.numel() and not b.is_complex()]
    if not named:
        return
    fingerprints = tuple([_fingerprint(buffer) for _, buffer in named])
    by_rank = torch.tensor(
        comm.agree("buffers of a parallel model", differ=fingerprints, optional=True), dtype=torch.float64
    )
    spread = (by_rank.amax(0) - by_rank.amin(0)).amax(1)
    different = spread > _TOLERANCE * by_rank[:, :, 1].amax(0)  # False for NaN, which all ranks may have
    if different.any():
        names = ", ".join(name for (name, _), differs in zip(named, different.tolist(), strict=True) if differs)
        raise MismatchError(
            f"rank {comm.rank} of {comm.size} along 'data': after a forward in training ranks differ in the buffers "
            f"{names}: they were computed from this rank's samples alone, not from the global batch. Batch "
            "normalisation of torch works; in your layer take the mean over ranks, comm.allreduce(x, 'mean'), use a "
            "grid without the axis data, or register_buffer(..., persistent=False) a buffer that may differ"
        )


def _saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in persistent_buffers(module)
    ]


def _fingerprint(x: Tensor) -> tuple[float, float]:
    """Returns two numbers that depend on all values."""
    values = x.detach().flatten().double().cpu()
    weights = torch.arange(1, len(values) + 1, dtype=torch.float64).cos()
    return (values @ weights).item(), values.norm().item()
