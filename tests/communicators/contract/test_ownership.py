"""Ownership of memory: the caller may change its arguments as soon as a call has returned."""

import torch

from tests._worlds import ranks

TURNS = 8


@ranks(2, 3, 4)
@ranks(2, on="openmpi")
def test_arguments_may_be_changed_as_soon_as_the_call_returns(comm):
    # Many turns without a barrier: ranks leave a gather or a scatter at different times, and one that leaves
    # early overwrites its argument while another may still be receiving it.
    everyone = range(comm.size)
    for turn in range(TURNS):
        for length in (3, 20_000):
            root = turn % comm.size
            x = torch.full((length,), float(comm.rank + turn))
            gathered = comm.gather(x, root)
            x.fill_(-1)
            if comm.rank == root:
                assert [part.unique().tolist() for part in gathered] == [[rank + turn] for rank in everyone]

            xs = [torch.full((length,), float(rank + turn)) for rank in everyone]
            mine = comm.scatter(xs if comm.rank == root else None, root)
            for part in xs:
                part.fill_(-1)
            assert mine.unique().tolist() == [comm.rank + turn]

            xs = [torch.full((length,), float(10 * comm.rank + rank)) for rank in everyone]
            swapped = comm.alltoall(xs)
            for part in xs:
                part.fill_(-1)
            assert [part.unique().tolist() for part in swapped] == [[10 * rank + comm.rank] for rank in everyone]

            xs = torch.full((comm.size, length), float(comm.rank + turn))
            summed = comm.reduce_scatter(xs)
            xs.fill_(-1)
            assert summed.unique().tolist() == [sum(everyone) + turn * comm.size]

            x = torch.full((length,), float(comm.rank + turn))
            parts = comm.allgather(x)
            total = comm.allreduce(x)
            x.fill_(-1)
            assert [part.unique().tolist() for part in parts] == [[rank + turn] for rank in everyone]
            assert total.unique().tolist() == [sum(everyone) + turn * comm.size]

            x = torch.full((length,), float(turn))
            copy = comm.bcast(x if comm.rank == root else None, root).clone()
            x.fill_(-1)
            assert copy.unique().tolist() == [turn]
