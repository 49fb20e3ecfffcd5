"""Sums large enough for another algorithm of the transport: the same values, and the same bits on all ranks."""

from __future__ import annotations

import torch
from torch import nn

from tests._worlds.marks import ranks

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.uint32, torch.complex64, torch.bfloat16)


@ranks(2, 3, 4)
@ranks(2, on="openmpi")
def test_large_sums_and_means_are_those_of_the_parts(comm) -> None:
    for count in (40_001, 65_537, 2_100_003):
        # Whole numbers, small enough that every order of adding them gives the same sum.
        parts = [torch.randint(0, 8, (count,), generator=torch.Generator().manual_seed(n)) for n in range(comm.size)]
        mine, total = parts[comm.rank], sum(parts)
        for dtype in DTYPES:
            found = comm.allreduce(mine.to(dtype))
            wide = torch.complex64 if dtype.is_complex else torch.float64  # torch compares no uint32
            assert found.dtype == dtype and torch.equal(found.to(wide), total.to(wide)), dtype
            if dtype.is_floating_point:
                mean = comm.allreduce(mine.to(dtype), "mean")
                torch.testing.assert_close(
                    mean, (total / comm.size).to(dtype), rtol=2**-7 if dtype.itemsize == 2 else 1e-6, atol=0
                )


@ranks(2, 3, on=("mpi", "openmpi"))
def test_many_large_sums_in_a_row_do_not_meet_each_other(comm) -> None:
    for turn in range(20):
        # Two ranks take another way for the shorter ones; all use the same shared memory, in turns. Three chunks and
        # two, so that a chunk comes to lie now in the one stage and now in the other.
        length = (600_000, 300_000 + turn, 50_000 + turn)[turn % 3]
        x = torch.full((length,), float(comm.rank))
        in_place = turn % 2 == 0
        assert (comm.allreduce(x + turn, in_place=in_place) == sum(range(comm.size)) + comm.size * turn).all()


@ranks(2, 3, on="mpi")
def test_all_ranks_get_the_same_bits(comm) -> None:
    for length in (100_001, 700_001):
        x = torch.randn(length, generator=torch.Generator().manual_seed(comm.rank))
        x[::2] *= 2.0**-149  # so small that the half of it is rounded
        expected = torch.stack(comm.allgather(x)).double().mean(dim=0)
        model = nn.ParameterList([x.clone()])
        model[0].grad = x.clone()
        comm.multi_node_mean_grad(model)
        results = comm.allreduce(x), comm.allreduce(x, "mean"), model[0].grad
        for result in results:
            assert all(torch.equal(other, result) for other in comm.allgather(result)), length
        torch.testing.assert_close(results[2].double(), expected, rtol=1e-6, atol=1e-7)
