"""Means over ranks of many tensors at once, with few messages and few copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchmn._torch_compat import flatten_tensors, foreach_copy_, unflatten_tensors
from torchmn.communicators.buffers import Buffers
from torchmn.communicators.messages import reductions

# A tensor of this size is sent by itself: copying it into a flat buffer would cost more than the few microseconds that
# one message less saves.
LARGE_BYTES = 1 << 20
BUCKET_BYTES = 64 << 20


class BufferCommunicator(Protocol):
    """The members of a `Communicator` that `means` uses."""

    size: int
    rank: int
    buffers: Buffers


def mean_in_place(
    comm: BufferCommunicator, tensors: Sequence[Tensor], share: float | None, wire_dtype: torch.dtype | None
) -> None:
    """Replaces tensors, of which all ranks have the same, by their means; see `means`."""
    for x, mean in zip(tensors, means(comm, tensors, share, wire_dtype), strict=True):
        if mean is not x:
            x.detach().copy_(mean)


def means(
    comm: BufferCommunicator, tensors: Sequence[Tensor], share: float | None, wire_dtype: torch.dtype | None
) -> list[Tensor]:
    """Returns the weighted means over ranks of tensors, of which all ranks have the same shapes and dtypes.

    Large tensors are reduced in place; the others together, in one flat buffer per dtype, of which their means are
    views. The mean of a tensor that is not contiguous, or that requires a gradient, is written into the tensor.

    Args:
        comm: communicator whose ranks take part.
        tensors: this rank's. They may be overwritten.
        share: weight of this rank; the weights of all ranks sum to 1. None on all ranks: equal weights. A share of
            1 / size on one rank does not mean equal weights, and the two cases are computed differently.
        wire_dtype: a 16-bit dtype in which floating-point tensors are sent, or None.
    """
    small, results = [], {}
    for x in tensors:
        if x.nbytes >= LARGE_BYTES:  # contiguous or not: that may differ between ranks
            flat = x.detach().contiguous().view(-1)
            _mean_flat(comm, flat, share, wire_dtype)
            if not x.is_contiguous():
                results[id(x)] = _written_into(x, flat.view(x.shape))
        elif x.numel():
            small.append(x)
    for bucket in buckets(small):
        with torch.no_grad():
            flat = flatten_tensors(bucket)
            _mean_flat(comm, flat, share, wire_dtype)
            for x, mean in zip(bucket, unflatten_tensors(flat, bucket), strict=True):
                in_buffer = x.is_contiguous() and not x.requires_grad
                results[id(x)] = mean if in_buffer else _written_into(x, mean)
    return [results.get(id(x), x) for x in tensors]


def _written_into(x: Tensor, mean: Tensor) -> Tensor:
    """Returns `x`, overwritten with `mean`; or `mean` itself if `x` is expanded, and its elements share memory."""
    if any(stride == 0 and extent > 1 for stride, extent in zip(x.stride(), x.shape, strict=True)):
        return mean
    x.detach().copy_(mean)
    return x


def _mean_flat(comm: BufferCommunicator, flat: Tensor, share: float | None, wire_dtype: torch.dtype | None) -> None:
    compressible = comm.size > 1 and flat.is_floating_point()
    if wire_dtype is not None and compressible and wire_dtype.itemsize < flat.dtype.itemsize:
        _mean_compressed(comm, flat, share, wire_dtype)
    elif share is None:
        comm.buffers.reduce(flat, "mean", in_place=True)
    elif flat.dtype != (accumulator := reductions.ACCUMULATORS[flat.dtype]):
        weighted = flat.to(accumulator).mul_(share)
        flat.copy_(comm.buffers.reduce(weighted, "sum", in_place=True))
    else:
        comm.buffers.reduce(flat.mul_(share), "sum", in_place=True)


def _mean_compressed(comm: BufferCommunicator, flat: Tensor, share: float | None, wire_dtype: torch.dtype) -> None:
    """Computes the mean with values sent in `wire_dtype`: a reduce-scatter in float32, then an all-gather.

    Transports that sum 16-bit floats round at every addition; this rounds once before and once after.
    """
    factor = 1.0 if share is None else share * comm.size
    counts = [len(part) for part in torch.empty(flat.numel(), device="meta").tensor_split(comm.size)]
    outgoing = (flat if factor == 1.0 else flat * factor).to(wire_dtype)
    received = comm.buffers.alltoall(list(outgoing.split(counts)), [(counts[comm.rank],)] * comm.size)
    total = reductions.reduce_in_order([part.to(torch.float32) for part in received], "sum")
    mean = comm.buffers.staged(total.div_(comm.size).to(wire_dtype))
    flat.copy_(comm.buffers.allgather_flat(mean, counts))


def buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Returns lists of tensors of one dtype and device, of about 64 MB at most, which bounds the memory for packing."""
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
    """Copies the parts of a flat buffer into the tensors that were packed into it."""
    parts = flat.split([x.numel() for x in tensors])
    foreach_copy_(list(tensors), [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)])
