"""The ring between hosts: the values of all ranks, with the same bits on each. Ranks of one machine take host names."""

from __future__ import annotations

import pytest
import torch
from mpi4py import MPI

from tests._worlds import ranks
from torchmn.communicators.fastpath.host_ring import HostRing, is_faster

HOSTS = {2: ["ab"], 3: ["abc", "aba", "abb"], 4: ["abcd", "aabb", "abca", "abbb"]}
LENGTHS = (100_000, 100_003)


@ranks(2, 3, 4, on="mpi")
@pytest.mark.parametrize("in_place", [False, True])
def test_every_rank_gets_the_sum_and_the_maximum(comm, in_place: bool) -> None:
    for hosts in HOSTS[comm.size]:
        ring = HostRing(comm.transport.collective, hosts)
        for dtype, datatype in ((torch.float64, MPI.DOUBLE), (torch.int32, MPI.INT32_T)):
            for length in LENGTHS:
                x = torch.arange(length, dtype=dtype) * (comm.rank + 1)
                for op, factor in ((MPI.SUM, comm.size * (comm.size + 1) // 2), (MPI.MAX, comm.size)):
                    source = x.clone()
                    out = source if in_place else torch.empty_like(x)
                    ring.reduce_(source, out, datatype, op)
                    assert torch.equal(out, torch.arange(length, dtype=dtype) * factor)
                    assert in_place or torch.equal(source, x)
        for mpi_comm in ring.comms:
            mpi_comm.Free()


@ranks(3, 4, on="mpi")
def test_sums_have_the_same_bits_on_all_ranks(comm) -> None:
    for hosts in HOSTS[comm.size]:
        ring = HostRing(comm.transport.collective, hosts)
        x = torch.randn(50_001, generator=torch.Generator().manual_seed(comm.rank))
        out = torch.empty_like(x)
        ring.reduce_(x, out, MPI.FLOAT, MPI.SUM)
        assert all(torch.equal(out, other) for other in comm.allgather(out))
        for mpi_comm in ring.comms:
            mpi_comm.Free()


def test_small_tensors_and_one_host_are_left_to_mpi() -> None:
    large = torch.empty(1 << 20)
    assert is_faster(large, hosts=2)
    assert not is_faster(large, hosts=1)
    assert not is_faster(large[:100], hosts=2)
