"""Operations on whole models: broadcast of parameters and buffers, and means of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from torchmn.communicators import arguments
from torchmn.communicators.agreement import Agreement
from torchmn.communicators.mean import LARGE_BYTES, BufferCommunicator, buckets, mean_in_place, unpack
from torchmn.communicators.transports.group import Settings
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.errors import MismatchError

Signature = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, dtype and shape of each tensor."""


class ModelCommunicator(BufferCommunicator, Protocol):
    """The members of a `Communicator` that this module uses."""

    @property
    def settings(self) -> Settings: ...

    def agreed(self, operation: str, problem: str | None = None, *, differ: Any = None, **same: Any) -> Agreement: ...


def bcast_data(comm: ModelCommunicator, model: nn.Module) -> None:
    """Overwrites every parameter and buffer of `model` with rank 0's; see `Communicator.bcast_data`."""
    bcast_tensors(comm, [*model.named_parameters(), *model.named_buffers()], "bcast_data")


def bcast_tensors(comm: ModelCommunicator, named: Sequence[tuple[str, Tensor]], operation: str) -> None:
    """Overwrites named tensors with rank 0's. Names, dtypes and shapes must be the same on all ranks."""
    lazy = [name for name, x in named if is_lazy(x)]
    problem = f"expected initialised parameters, got lazy {', '.join(lazy)}: run a forward pass first" if lazy else None
    problem = problem or _first_problem(named, written=comm.rank != 0)
    signature = tuple((name, x.dtype, tuple(x.shape)) for name, x in named) if problem is None else ()
    with comm.agreed(operation, problem, differ=signature) as ranks:
        if not ranks.alike:
            raise_difference(comm, operation, "tensor", ranks.differ)
        tensors = [x.detach() for _, x in named]
        for x in tensors:
            if x.nbytes >= LARGE_BYTES:  # in place: a copy would double the memory of large models
                source = comm.buffers.staged(x) if comm.rank == 0 else None
                received = comm.buffers.bcast_tensor(source, x.is_cuda, 0, into=x)
                if comm.rank != 0 and received is not x:
                    x.copy_(received)
        small = [x for x in tensors if x.nbytes < LARGE_BYTES]
        for places in buckets(small):
            bucket = [small[place] for place in places]
            source = comm.buffers.staged(torch.cat([x.reshape(-1) for x in bucket])) if comm.rank == 0 else None
            received = comm.buffers.bcast_tensor(source, bucket[0].is_cuda, 0)
            if comm.rank != 0:
                unpack(received.to(bucket[0].device), bucket)


def multi_node_mean_grad(comm: ModelCommunicator, model: nn.Module, zero_fill: bool) -> None:
    """Replaces each gradient of `model` by its mean over ranks; see `Communicator.multi_node_mean_grad`."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or p.grad is not None]
    # Lazy parameters have no gradient on any rank.
    named = [
        (name, p) for name, p in named if p.grad is not None or (zero_fill and type(p) is not UninitializedParameter)
    ]
    sparse = [name for name, p in named if p.grad is not None and p.grad.layout is not torch.strided]
    problem = f"expected dense gradients, got a sparse one of {', '.join(sparse)}" if sparse else None
    problem = problem or _first_problem([(name, p.grad) for name, p in named if p.grad is not None], written=True)
    signature = tuple((name, p.dtype if p.grad is None else p.grad.dtype, tuple(p.shape)) for name, p in named)
    grad_dtype = comm.settings.grad_dtype
    with comm.agreed("multi_node_mean_grad", problem, differ=signature, grad_dtype=grad_dtype) as ranks:
        if not ranks.alike:
            raise_difference(comm, "multi_node_mean_grad", "gradient", ranks.differ)
        for _, parameter in named:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for _, p in named if p.grad is not None]
        mean_in_place(comm, grads, None, grad_dtype)


def _first_problem(named: Sequence[tuple[str, Tensor]], written: bool) -> str | None:
    """Returns why the first of these tensors cannot be sent or, with `written`, overwritten; None if all can."""
    problems = ((name, arguments.tensor_problem(x, written)) for name, x in named)
    return next((f"{name}: {problem}" for name, problem in problems if problem), None)


def raise_difference(comm: ModelCommunicator, operation: str, what: str, signatures: Sequence[Signature]) -> None:
    """Raises a MismatchError that names each tensor which not all ranks have, and the ranks that have it.

    Args:
        comm: communicator whose ranks were compared.
        operation: its name, for the message.
        what: the kind of tensor, for the message: tensor, gradient or buffer.
        signatures: (name, dtype, shape) of each tensor, of each rank.
    """
    holders: dict[tuple[str, torch.dtype, tuple[int, ...]], list[int]] = {}
    for rank, signature in enumerate(signatures):
        for entry in signature:
            holders.setdefault(entry, []).append(rank)
    lines = [f"rank {comm.rank} of {comm.size}: {operation}: ranks do not have the same {what}s; nothing was sent:"]
    for (name, dtype, shape), ranks in holders.items():
        if len(ranks) < comm.size:
            without = [rank for rank in range(comm.size) if rank not in ranks]
            lines.append(
                f"  {what} of {name!r} ({dtype}, {tuple(shape)}): on rank {ranks_text(ranks)}, "
                f"not on rank {ranks_text(without)}"
            )
    if len(lines) == 1:
        lines.append("  the same ones, but in another order")
    if what == "gradient":
        lines.append("Pass zero_fill=True to count a missing gradient as zeros.")
    else:
        lines.append("Build the model with the same arguments on every rank.")
    raise MismatchError("\n".join(lines))
