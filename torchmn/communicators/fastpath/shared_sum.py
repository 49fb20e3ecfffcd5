"""All-reduce (sum) over the ranks of one host through shared memory: `SharedSum`.

A tensor is split into one part per rank. Each rank copies its values into its shared buffer (the stage), scaled if that
is exact, sums one part over all ranks, writes the result back into the stages of all ranks, and copies the results of
the other parts from its own stage. An MPI library does the same with more copies, and with fresh memory for every call.
Two ranks with a small tensor both sum all of it instead, which needs one barrier only.
"""

from __future__ import annotations

from math import frexp
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from torchmn.communicators.fastpath.shared_memory import share
from torchmn.communicators.messages.reductions import scale_

CHUNK_BYTES = 1 << 20
"""Size of a stage. With half of it, a large sum is a fifth slower; stages add to the memory of every rank."""
_CACHED_VIEWS = 4000  # tensors; an entry has one per rank, or one per rank and part. At least 8 entries
DTYPES = {
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
}
"""Dtypes that torch can add; MPI adds the others."""


def is_faster(x: Tensor, ranks: int) -> bool:
    """Returns whether this sum is faster than MPI's, by measurements: MPI is faster for small tensors."""
    return x.nbytes >= (128 << 10 if ranks == 2 else 1 << 20) and x.dtype in DTYPES


class SharedSum:
    """The stages of a communicator's ranks: two per rank, used in turns, so that one can be read while one is written.

    Each part of a stage is read by one other rank only, which overwrites it with the result; and the result is read by
    the owner of the stage only, which may overwrite it with new values at once.
    """

    def __init__(self, comm: MPI.Comm):
        self._comm = comm
        self._rank = comm.rank
        self._others = [rank for rank in range(comm.size) if rank != comm.rank]
        self._turn = 0
        maps = share(comm, 2 * CHUNK_BYTES)  # the tensors keep them alive
        # Tensors that are made in inference mode, as in an evaluation, cannot be written outside of it.
        with torch.inference_mode(False):
            self._stages = [torch.frombuffer(maps[rank], dtype=torch.uint8) for rank in range(len(maps))]
        self._parts: dict[tuple[int, torch.dtype, int], _Stages] = {}
        self._whole: dict[tuple[int, torch.dtype, torch.Size], list[Tensor]] = {}

    @property
    def works(self) -> bool:
        """Whether all ranks share memory; the same on every rank."""
        return bool(self._stages)

    def sum_(self, source: Tensor, flat: Tensor, scale: float) -> None:
        """Writes `scale` times the sum of all ranks' `source` into `flat`, which may be it, bitwise equal on all."""
        before, after = (scale, 1.0) if _is_power_of_two(scale) else (1.0, scale)
        if len(self._others) == 1 and flat.nbytes <= CHUNK_BYTES:
            _copy_scaled(source, before, self._whole_stages(source)[self._rank])
            self._comm.Barrier()
            first, second = self.read(source)
            torch.add(first, second, out=flat)
            scale_(flat, after)
            return
        totals = flat.split(CHUNK_BYTES // flat.element_size())
        sources = totals if source.data_ptr() == flat.data_ptr() else source.split(len(totals[0]))
        summed: _Chunk | None = None
        # Each barrier serves two chunks: this one is written and may be summed, the last one is summed and may be read.
        for chunk_source, total in zip(sources, totals, strict=True):
            chunk = self._write(chunk_source, total, before)
            self._comm.Barrier()
            if summed is not None:
                self._collect(summed)
            self._sum_own_part(chunk, before, after)
            summed = chunk
        self._comm.Barrier()
        if summed is not None:
            self._collect(summed)

    def write(self, x: Tensor) -> None:
        """Writes `x`, of at most CHUNK_BYTES, into this rank's stage. Ranks must synchronize before `read`."""
        self._whole_stages(x)[self._rank].copy_(x)

    def read(self, x: Tensor) -> list[Tensor]:
        """Returns all ranks' tensors, of the shape and dtype of `x`, in rank order, after all have called `write`.

        They are valid until the second next call that all ranks make.
        """
        views = self._whole_stages(x)
        self._turn = 1 - self._turn  # here and not in `write`: if ranks are in different operations, none of them reads
        return views

    def _whole_stages(self, x: Tensor) -> list[Tensor]:
        """Returns views, like `x`, of the stages of all ranks whose turn it is."""
        key = (self._turn, x.dtype, x.shape)
        views = self._whole.get(key)
        if views is None:
            if len(self._whole) >= max(8, _CACHED_VIEWS // len(self._stages)):
                self._whole.clear()
            start = self._turn * CHUNK_BYTES
            with torch.inference_mode(False):
                views = [stage[start : start + x.nbytes].view(x.dtype).view(x.shape) for stage in self._stages]
            self._whole[key] = views
        return views

    def _write(self, source: Tensor, total: Tensor, scale: float) -> _Chunk:
        """Writes the parts that other ranks sum into this rank's stage."""
        stages = self._next_stages(total.dtype, len(total))
        size = len(self._stages)
        parts = total.tensor_split(size)
        chunk = _Chunk(parts if source is total else source.tensor_split(size), parts, stages)
        stage = stages[self._rank]
        for rank in self._others:
            _copy_scaled(chunk.source[rank], scale, stage[rank])
        return chunk

    def _sum_own_part(self, chunk: _Chunk, before: float, after: float) -> None:
        """Sums this rank's part over all ranks, and writes the result into the stages of the other ranks."""
        rank = self._rank
        total, others = chunk.total[rank], [chunk.stages[other][rank] for other in self._others]
        torch.add(others[0], chunk.source[rank], alpha=1 if before == 1.0 else before, out=total)  # ints take no float
        for values in others[1:]:
            total.add_(values)
        scale_(total, after)
        for values in others:
            values.copy_(total)

    def _collect(self, chunk: _Chunk) -> None:
        """Copies the parts that other ranks have summed."""
        stage = chunk.stages[self._rank]
        for rank in self._others:
            chunk.total[rank].copy_(stage[rank])

    def _next_stages(self, dtype: torch.dtype, length: int) -> _Stages:
        """Returns the parts of all ranks' stages whose turn it is."""
        views = self._parts.get((self._turn, dtype, length))
        if views is None:
            if len(self._parts) >= max(8, _CACHED_VIEWS // len(self._stages) ** 2):
                self._parts.clear()
            start, size = self._turn * CHUNK_BYTES, len(self._stages)
            end = start + length * dtype.itemsize
            with torch.inference_mode(False):
                views = [stage[start:end].view(dtype).tensor_split(size) for stage in self._stages]
            self._parts[self._turn, dtype, length] = views
        self._turn = 1 - self._turn
        return views


def _is_power_of_two(scale: float) -> bool:
    """Returns whether scaling is exact and may precede the sum; else values that cancel would not sum to zero."""
    return frexp(scale)[0] == 0.5


def _copy_scaled(source: Tensor, scale: float, into: Tensor) -> None:
    """Copies and scales in one pass over memory; scaling the sum would be another."""
    if scale == 1.0:
        into.copy_(source)
    else:
        torch.mul(source, scale, out=into)


_Stages = list[tuple[Tensor, ...]]
"""[rank][part]: the values of `rank` for the rank that sums `part`, and later the result."""


class _Chunk(NamedTuple):
    """One chunk of a sum."""

    source: tuple[Tensor, ...]  # this rank's values, one part per rank
    total: tuple[Tensor, ...]  # the sums, one part per rank
    stages: _Stages
