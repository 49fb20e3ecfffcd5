"""Small sums piggyback on the comparison of arguments: right values, and no trace of operations that failed."""

from __future__ import annotations

import pytest
import torch

import torchmn
from tests._worlds.marks import ranks

# Around 8 KB (beside the comparison), and up to 2 MB (shown in shared memory, once a larger sum has made some).
COUNTS = (1, 2047, 2048, 2049, 100_000, (1 << 19) - 1, 1 << 19)


def part(rank: int, count: int, turn: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).remainder(100).add_(rank * 1000 + turn)


def total(size: int, count: int, turn: int) -> torch.Tensor:
    return sum((part(rank, count, turn) for rank in range(size)), torch.zeros(count))


@ranks(2, 3, 4, on="mpi")
@ranks(2, on=("threads", "openmpi"))
def test_sums_of_all_sizes_in_any_order_are_those_of_the_parts(comm) -> None:
    comm.allreduce(torch.ones(1 << 20))
    for turn, count in enumerate((*COUNTS, *reversed(COUNTS))):
        x = part(comm.rank, count, turn)
        assert torch.equal(comm.allreduce(x), total(comm.size, count, turn)), count
        assert torch.equal(x, part(comm.rank, count, turn)), "the argument is untouched"
        assert comm.allreduce(x, "max", in_place=True) is x
        assert torch.equal(x, part(comm.size - 1, count, turn)), count
        matrix = part(comm.rank, 2 * count, turn).view(2, count).t()
        assert torch.equal(comm.allreduce(matrix), total(comm.size, 2 * count, turn).view(2, count).t())


@ranks(2, 3, on="mpi")
@ranks(2, on="threads")
def test_a_refused_sum_leaves_tensors_and_later_sums_alone(comm) -> None:
    comm.allreduce(torch.ones(1 << 20))
    for turn in range(5):
        for count in (100, 50_000):
            x = part(comm.rank, count + comm.rank, turn)
            with pytest.raises(torchmn.MismatchError, match="disagree in allreduce"):
                comm.allreduce(x, in_place=True)
            assert torch.equal(x, part(comm.rank, count + comm.rank, turn))
            with pytest.raises(torchmn.MismatchError, match="call different operations"):
                comm.barrier() if comm.rank else comm.allreduce(x)
            assert torch.equal(comm.allreduce(part(comm.rank, count, turn)), total(comm.size, count, turn))
            large = part(comm.rank, 600_001, turn)
            assert torch.equal(comm.allreduce(large), total(comm.size, 600_001, turn))


@ranks(2, 3, on="mpi")
def test_all_ranks_get_the_same_bits_of_a_small_sum(comm) -> None:
    for dtype in (torch.float32, torch.float64, torch.complex64):
        x = torch.randn(700, dtype=dtype, generator=torch.Generator().manual_seed(comm.rank))
        for op in ("sum", "mean", "prod"):
            result = comm.allreduce(x, op)
            assert all(torch.equal(other, result) for other in comm.allgather(result)), (dtype, op)


@ranks(2, 3, on="mpi")
@ranks(2, on="threads")
def test_a_sum_that_comes_again_is_compared_again(comm) -> None:
    def summed(x: torch.Tensor) -> None:
        assert torch.equal(comm.allreduce(x), total(comm.size, 100, 0))

    plain, parameter = part(comm.rank, 100, 0), torch.nn.Parameter(part(comm.rank, 100, 0))
    summed(plain)
    summed(plain)
    summed(plain if comm.rank else parameter)  # cached on one rank, new on the other
    with pytest.raises(torchmn.MismatchError, match="disagree in allreduce"):
        comm.allreduce(plain, "sum" if comm.rank else "max", in_place=True)
    with pytest.raises(torchmn.ArgumentError, match="op"):
        comm.allreduce(plain, ["sum"] if comm.rank else "sum")
    assert torch.equal(plain, part(comm.rank, 100, 0))
    summed(plain)
    limit, comm.max_message_bytes = comm.max_message_bytes, 128
    try:
        summed(plain if comm.rank else parameter)  # in pieces now, on all ranks
    finally:
        comm.max_message_bytes = limit
