"""Operations on whole models: one rank's values to all, and the mean of all ranks' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchmn.communicators import reductions
from torchmn.communicators.watchdog import ranks_text
from torchmn.errors import MismatchError

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator

# A tensor of this size is worth a message of its own: copying it into a flat buffer would cost more than the
# few microseconds that a message saves.
LARGE_BYTES = 1 << 20
BUCKET_BYTES = 64 << 20

Signature = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def bcast_data(comm: Communicator, model: nn.Module) -> None:
    """Overwrite every parameter and buffer of `model` with rank 0's."""
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, x in named if is_lazy(x)]
    problem = (
        f"expected initialised parameters, got lazy {', '.join(lazy)}: run one forward pass first" if lazy else None
    )
    signature = tuple((name, x.dtype, tuple(x.shape)) for name, x in named) if problem is None else ()
    told = comm._meet("bcast_data", problem, may_differ=signature)
    if told:
        _raise_difference(comm, "bcast_data", "tensor", told)
    for bucket in _buckets([x.detach() for _, x in named]):
        flat = torch.cat([x.reshape(-1) for x in bucket]) if comm.rank == 0 else None
        flat = comm._bcast_tensor(None if flat is None else comm._outgoing(flat), bucket[0].is_cuda, 0)
        if comm.rank != 0:
            _unpack(flat.to(bucket[0].device), bucket)


def multi_node_mean_grad(comm: Communicator, model: nn.Module, zero_fill: bool) -> None:
    """Replace each gradient of `model` by its mean over ranks."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad or p.grad is not None]
    if not zero_fill:
        named = [(name, p) for name, p in named if p.grad is not None]
    sparse = [name for name, p in named if p.grad is not None and p.grad.layout is not torch.strided]
    problem = f"expected dense gradients, got a sparse one of {', '.join(sparse)}" if sparse else None
    signature = tuple((name, p.dtype if p.grad is None else p.grad.dtype, tuple(p.shape)) for name, p in named)
    told = comm._meet("multi_node_mean_grad", problem, may_differ=signature)
    if told:
        _raise_difference(comm, "multi_node_mean_grad", "gradient", told)
    for _, parameter in named:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    mean_in_place(comm, [p.grad for _, p in named if p.grad is not None])


def mean_in_place(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Replace tensors, of which all ranks have the same, by their means: large ones where they lie, the
    others together through one flat buffer per dtype."""
    tensors = [x.detach() for x in tensors]
    large = [x for x in tensors if x.nbytes >= LARGE_BYTES and x.is_contiguous()]
    for x in large:
        _mean_flat(comm, x.view(-1))
    together = {id(x) for x in large}
    for bucket in _buckets([x for x in tensors if id(x) not in together]):
        flat = torch.cat([x.reshape(-1) for x in bucket])
        _mean_flat(comm, flat)
        _unpack(flat, bucket)


def _mean_flat(comm: Communicator, flat: Tensor) -> None:
    wire_dtype = comm.settings.grad_dtype
    if wire_dtype is None or not flat.is_floating_point() or flat.dtype.itemsize <= wire_dtype.itemsize:
        comm._reduce(flat, "mean", in_place=True)
    elif comm.size > 1:
        _mean_compressed(comm, flat, wire_dtype)


def _mean_compressed(comm: Communicator, flat: Tensor, wire_dtype: torch.dtype) -> None:
    """The mean with half the bytes: each rank gathers its part of all, sums it in float32, hands the mean out.

    No transport sums 16-bit floats without rounding at every step; this rounds once before and once after.
    """
    counts = [len(part) for part in torch.arange(flat.numel()).tensor_split(comm.size)]
    mine = counts[comm.rank]
    parts = list(comm._outgoing(flat.to(wire_dtype)).split(counts))
    received = comm._swap(parts, [(mine,)] * comm.size)
    total = reductions.reduce_in_order([part.to(torch.float32) for part in received], "sum")
    whole = comm._allgather_whole(total.div_(comm.size).to(wire_dtype), counts)
    flat.copy_(whole)


def _buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, at most about 64 MB of them, so that packing stays small."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for x in tensors:
        bucket, size = open_buckets.get((x.dtype, x.device), ([], 0))
        if not bucket or size + x.nbytes > BUCKET_BYTES:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(x)
        open_buckets[x.dtype, x.device] = (bucket, size + x.nbytes)
    return buckets


def _unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    parts = flat.split([x.numel() for x in tensors])
    torch._foreach_copy_(list(tensors), [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)])


def _raise_difference(comm: Communicator, operation: str, what: str, told: Sequence[Signature]) -> None:
    """Raise, naming each tensor that is not alike on all ranks and the ranks that have it."""
    holders: dict[tuple, list[int]] = {}
    for rank, signature in enumerate(told):
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
        lines.append("  they have the same ones, but in another order")
    if what == "gradient":
        lines.append("Pass zero_fill=True to count a gradient that is missing as zeros.")
    else:
        lines.append("Build the model with the same arguments on every rank.")
    raise MismatchError("\n".join(lines))
