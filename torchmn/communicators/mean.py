"""The mean over ranks of many tensors at once: few messages, few copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchmn._torch_compat import flatten_tensors, foreach_copy_, unflatten_tensors
from torchmn.communicators.buffers import Buffers
from torchmn.communicators.messages import reductions

# A tensor of this size is worth a message of its own: copying it into a flat buffer would cost more than the
# few microseconds that a message saves.
LARGE_BYTES = 1 << 20
BUCKET_BYTES = 64 << 20


class _Communicator(Protocol):
    size: int
    rank: int
    buffers: Buffers


def mean_in_place(
    comm: _Communicator, tensors: Sequence[Tensor], share: float | None, wire_dtype: torch.dtype | None
) -> None:
    """Replace tensors, of which all ranks have the same, by their means; `share` as for `means`."""
    for x, mean in zip(tensors, means(comm, tensors, share, wire_dtype), strict=True):
        if mean is not x:
            x.detach().copy_(mean)


def means(
    comm: _Communicator, tensors: Sequence[Tensor], share: float | None, wire_dtype: torch.dtype | None
) -> list[Tensor]:
    """The means of tensors, of which all ranks have the same, and in which this rank counts `share`.

    None: all ranks count the same. All ranks must know that, or none: a share that happens to be 1 / size says nothing
    of the others', and a rank that takes another way than they do gets another result.

    Large ones are reduced where they lie, the others together in one flat buffer per dtype: their means are views of
    it. But one that lies in another order, or belongs to a graph, gets its mean where it is.
    """
    small, elsewhere = [], {}
    for x in tensors:
        if x.nbytes >= LARGE_BYTES:  # its order must not matter here: on another rank it may lie in another one
            flat = x.detach().contiguous().view(-1)
            _mean_flat(comm, flat, share, wire_dtype)
            if not x.is_contiguous():
                elsewhere[id(x)] = _kept_in_place(x, flat.view(x.shape))
        elif x.numel():
            small.append(x)
    for bucket in buckets(small):
        with torch.no_grad():
            flat = flatten_tensors(bucket)
            _mean_flat(comm, flat, share, wire_dtype)
            for x, mean in zip(bucket, unflatten_tensors(flat, bucket), strict=True):
                in_buffer = x.is_contiguous() and not x.requires_grad
                elsewhere[id(x)] = mean if in_buffer else _kept_in_place(x, mean)
    return [elsewhere.get(id(x), x) for x in tensors]


def _kept_in_place(x: Tensor, mean: Tensor) -> Tensor:
    """`x` with the values of `mean` written into it; `mean` itself if `x` is expanded: one place is many elements."""
    if any(stride == 0 and extent > 1 for stride, extent in zip(x.stride(), x.shape, strict=True)):
        return mean
    x.detach().copy_(mean)
    return x


def _mean_flat(comm: _Communicator, flat: Tensor, share: float | None, wire_dtype: torch.dtype | None) -> None:
    compressed = wire_dtype is not None and flat.is_floating_point() and wire_dtype.itemsize < flat.dtype.itemsize
    if compressed and comm.size > 1:
        _mean_compressed(comm, flat, share, wire_dtype)  # type: ignore[arg-type]
    elif share is None:
        comm.buffers.reduce(flat, "mean", in_place=True)
    elif flat.dtype != (wide := reductions.ACCUMULATORS[flat.dtype]):
        weighted = flat.to(wide).mul_(share)
        flat.copy_(comm.buffers.reduce(weighted, "sum", in_place=True))
    else:
        comm.buffers.reduce(flat.mul_(share), "sum", in_place=True)


def _mean_compressed(comm: _Communicator, flat: Tensor, share: float | None, wire_dtype: torch.dtype) -> None:
    """The mean with fewer bytes: each rank gathers its part from all, sums it in float32, hands the mean out.

    No transport sums 16-bit floats without rounding at every step; this rounds once before and once after.
    """
    factor = 1.0 if share is None else share * comm.size
    counts = [len(part) for part in torch.empty(flat.numel(), device="meta").tensor_split(comm.size)]
    outgoing = (flat if factor == 1.0 else flat * factor).to(wire_dtype)
    received = comm.buffers.swap(list(outgoing.split(counts)), [(counts[comm.rank],)] * comm.size)
    total = reductions.reduce_in_order([part.to(torch.float32) for part in received], "sum")
    mean = comm.buffers.outgoing(total.div_(comm.size).to(wire_dtype))
    flat.copy_(comm.buffers.allgather_whole(mean, counts))


def buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one dtype and device together, at most about 64 MB of them, so that packing stays small."""
    found: list[list[Tensor]] = []
    latest: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for x in tensors:
        bucket, size = latest.get((x.dtype, x.device), ([], 0))
        if not bucket or size + x.nbytes > BUCKET_BYTES:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(x)
        latest[x.dtype, x.device] = (bucket, size + x.nbytes)
    return found


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of a flat buffer into the tensors that were packed into it."""
    parts = flat.split([x.numel() for x in tensors])
    foreach_copy_(list(tensors), [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)])
