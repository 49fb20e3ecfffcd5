"""Means over ranks of many tensors at once, with few messages and few copies."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, eq
from typing import Protocol

import torch
from torch import Tensor

from torchmn._torch_compat import foreach_copy_, unflatten_tensors
from torchmn.communicators.buffers import Buffers
from torchmn.communicators.messages import reductions

# A tensor of this size is sent by itself: copying it into a flat buffer would cost more than the few microseconds that
# one message less saves.
LARGE_BYTES = 1 << 20
BUCKET_BYTES = 64 << 20

_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


class BufferCommunicator(Protocol):
    """The members of a `Communicator` that `Means` uses."""

    size: int
    rank: int
    buffers: Buffers


def mean_in_place(
    comm: BufferCommunicator, tensors: list[Tensor], share: float | None, wire_dtype: torch.dtype | None
) -> None:
    """Replaces tensors, of which all ranks have the same, by their means; see `Means`."""
    for x, mean in zip(tensors, Means(comm, wire_dtype, tensors)(tensors, share), strict=True):
        if mean is not x:
            x.detach().copy_(mean)


class TensorShapes:
    """Shapes and dtypes of a list of tensors."""

    def __init__(self, tensors: Sequence[Tensor] = ()):
        self.shapes = [x.shape for x in tensors]
        self.dtypes = [x.dtype for x in tensors]

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether `tensors` have these shapes and dtypes.

        Without a line of Python per tensor, and without objects that stay until the end, which would set off garbage
        collections.
        """
        return (
            len(tensors) == len(self.shapes)
            and all(map(eq, map(_shape_of, tensors), self.shapes))
            and all(map(eq, map(_dtype_of, tensors), self.dtypes))
        )


class _Bucket:
    """Small tensors of one dtype and device that are sent together.

    Attributes:
        places: their places in the list of tensors.
        flat: the buffer into which they are packed.
        views: the parts of it, in their shapes.
    """

    def __init__(self, places: list[int], tensors: Sequence[Tensor], memory: Tensor):
        packed = [tensors[place] for place in places]
        self.places = places
        self.flat = memory[: sum(x.numel() for x in packed)]
        self.views = list(unflatten_tensors(self.flat, packed))


class Means:
    """Weighted means over ranks of a list of tensors, of which all ranks have the same shapes and dtypes.

    Large tensors are reduced by themselves; the others together, in flat buffers that are kept from call to call.

    Args:
        comm: communicator whose ranks take part.
        wire_dtype: a 16-bit dtype in which floating-point tensors are sent, or None.
        like: tensors with the shapes, dtypes and devices of those in each call.
    """

    def __init__(self, comm: BufferCommunicator, wire_dtype: torch.dtype | None, like: Sequence[Tensor]):
        self.comm = comm
        self.wire_dtype = wire_dtype
        self._large = [place for place, x in enumerate(like) if x.nbytes >= LARGE_BYTES]
        self._buckets = _packed_buckets(like)

    def __call__(self, tensors: list[Tensor], share: float | None) -> list[Tensor]:
        """Overwrites this rank's tensors with the means, and returns the list.

        If some cannot be overwritten, such as an expanded one, a list with other tensors in their place is returned.

        Args:
            tensors: this rank's.
            share: weight of this rank; the weights of all ranks sum to 1. None on all ranks: equal weights. A share of
                1 / size on one rank does not mean equal weights, and the two cases are computed differently.
        """
        replaced: dict[int, Tensor] = {}  # by place
        with torch.no_grad():
            for place in self._large:
                x = tensors[place]
                flat = x.detach().contiguous().view(-1)  # contiguous or not: that may differ between ranks
                self._reduce(flat, share)
                if not x.is_contiguous():
                    _write_into(x, flat.view(x.shape), replaced, place)
            for bucket in self._buckets:
                packed = [tensors[place] for place in bucket.places]
                foreach_copy_(bucket.views, packed)
                self._reduce(bucket.flat, share)
                if all(map(Tensor.is_contiguous, packed)) and not any(map(Tensor.is_inference, packed)):
                    foreach_copy_(packed, bucket.views)
                else:
                    for place, x, mean in zip(bucket.places, packed, bucket.views, strict=True):
                        _write_into(x, mean, replaced, place)
        return [replaced.get(place, x) for place, x in enumerate(tensors)] if replaced else tensors

    def _reduce(self, flat: Tensor, share: float | None) -> None:
        """Replaces a contiguous tensor by its mean."""
        comm, wire_dtype = self.comm, self.wire_dtype
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


def _packed_buckets(tensors: Sequence[Tensor]) -> list[_Bucket]:
    """Returns buckets of the small ones of these tensors; those of the same dtype and device share their memory."""
    small = [place for place, x in enumerate(tensors) if 0 < x.nbytes < LARGE_BYTES]
    found = [[small[number] for number in numbers] for numbers in buckets([tensors[place] for place in small])]
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for places in found:
        kind = tensors[places[0]].dtype, tensors[places[0]].device
        sizes[kind] = max(sizes.get(kind, 0), sum(tensors[place].numel() for place in places))
    with torch.inference_mode(False):  # tensors that are made in inference mode cannot be written outside of it
        memory = {kind: torch.empty(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
        return [
            _Bucket(places, tensors, memory[tensors[places[0]].dtype, tensors[places[0]].device]) for places in found
        ]


def _write_into(x: Tensor, mean: Tensor, replaced: dict[int, Tensor], place: int) -> None:
    """Overwrites `x` with `mean`; puts a copy of it into `replaced` if `x` is expanded or cannot be written."""
    is_expanded = any(stride == 0 and extent > 1 for stride, extent in zip(x.stride(), x.shape, strict=True))
    if is_expanded or x.is_inference():
        replaced[place] = mean.clone()
    else:
        x.detach().copy_(mean)


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


def buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns lists of the places of tensors of one dtype and device, of about 64 MB at most: they are sent together.

    The bound limits the memory for packing.
    """
    found: list[list[int]] = []
    latest: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for place, x in enumerate(tensors):
        bucket, size = latest.get((x.dtype, x.device), ([], 0))
        if not bucket or size + x.nbytes > BUCKET_BYTES:
            bucket, size = [], 0
            found.append(bucket)
        bucket.append(place)
        latest[x.dtype, x.device] = (bucket, size + x.nbytes)
    return found


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies the parts of a flat buffer into the tensors that were packed into it."""
    parts = flat.split([x.numel() for x in tensors])
    foreach_copy_(list(tensors), [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)])
