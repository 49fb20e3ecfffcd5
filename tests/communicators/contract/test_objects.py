"""The `_obj` operations: anything that pickles, including None."""

import operator
from dataclasses import dataclass

import numpy as np
import torch

import torchmn
from tests._worlds import every_world, every_world_of_several, ranks
from tests._worlds.data import assert_refused, assert_same, bits, roots


@dataclass(frozen=True)
class Measurement:
    """A user's own class."""

    name: str
    values: tuple[float, ...]


def assorted(rank: int) -> list:
    """Objects of many kinds and sizes, different on each rank."""
    return [
        None,
        rank,
        "",
        b"\x00" * (rank + 1),
        {"rank": rank, "nested": [(), {1, 2, rank}, {"deep": None}]},
        Measurement("loss", (0.5, float(rank))),
        list(range(100 * rank)),
        "x" * (10_000 + rank),
    ]


@ranks(2, on=("threads", "mpi"))
def test_tensors_of_dtypes_that_torch_cannot_unpickle_arrive_in_objects(comm):
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2):
        for mine in (
            torch.arange(6.0).reshape(2, 3).t().to(dtype),
            torch.ones((), dtype=dtype),
            torch.zeros(0, 3).to(dtype),
        ):
            for arrived in comm.allgather_obj({"x": mine, "again": [mine, torch.nn.Parameter(mine, False)]}):
                for x in (arrived["x"], *arrived["again"]):
                    assert (x.dtype, x.shape) == (dtype, mine.shape)
                    assert x.double().equal(mine.double())


@every_world_of_several
@ranks(2, on="openmpi")
def test_objects_go_round_a_ring(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for mine, expected in zip(assorted(comm.rank), assorted(left), strict=True):
        comm.send_obj(mine, right, tag=2)
        assert comm.recv_obj(left, tag=2) == expected


@every_world
@ranks(3, on="openmpi")
def test_bcast_gives_every_rank_the_object_of_any_root(comm):
    for root in roots(comm):
        for obj in assorted(root):
            assert comm.bcast_obj(obj if comm.rank == root else "ignored", root) == obj


@every_world
@ranks(3, on="openmpi")
def test_gather_and_allgather_list_all_objects_in_rank_order(comm):
    for kind, mine in enumerate(assorted(comm.rank)):
        expected = [assorted(rank)[kind] for rank in range(comm.size)]
        assert comm.allgather_obj(mine) == expected
        for root in roots(comm):
            got = comm.gather_obj(mine, root)
            assert got == (expected if comm.rank == root else None)


@every_world
@ranks(3, on="openmpi")
def test_scatter_gives_each_rank_its_object(comm):
    for root in roots(comm):
        for kind in range(len(assorted(0))):
            objs = [assorted(rank)[kind] for rank in range(comm.size)]
            got = comm.scatter_obj(objs if comm.rank == root else None, root)
            assert got == assorted(comm.rank)[kind]
    assert comm.scatter_obj(tuple(range(comm.size))) == comm.rank


@every_world
def test_allreduce_joins_in_rank_order(comm):
    everyone = range(comm.size)
    assert comm.allreduce_obj([comm.rank]) == list(everyone)
    assert comm.allreduce_obj(f"{comm.rank},") == "".join(f"{rank}," for rank in everyone)
    assert comm.allreduce_obj(comm.rank + 1, operator.mul) == np.prod([rank + 1 for rank in everyone])
    assert comm.allreduce_obj((comm.rank,), op=lambda a, b: a + b) == tuple(everyone)
    assert comm.allreduce_obj({f"r{comm.rank}": comm.rank}, op=operator.or_) == {f"r{r}": r for r in everyone}


@ranks(1, 2, 3)
def test_tensors_and_arrays_inside_objects_keep_their_bits(comm):
    for rank, got in enumerate(
        comm.allgather_obj({"x": bits((3, 2), torch.bfloat16, comm.rank), "n": np.arange(comm.rank)})
    ):
        assert_same(got["x"], bits((3, 2), torch.bfloat16, rank))
        np.testing.assert_array_equal(got["n"], np.arange(rank))


@ranks(2, 3)
def test_each_rank_owns_the_objects_it_got(comm):
    mine = [comm.rank]
    everyone = comm.allgather_obj(mine)
    shared = comm.bcast_obj(["from root"] if comm.rank == 0 else None)
    comm.barrier()
    for obj in everyone:
        obj.append("changed")
    shared.append(comm.rank)
    comm.barrier()
    assert everyone == [[rank, "changed"] for rank in range(comm.size)]
    assert shared == ["from root", comm.rank]


@ranks(1, 2, 3)
def test_what_does_not_pickle_on_one_rank_is_refused_on_every_rank(comm):
    culprit = comm.size - 1
    obj = (lambda: None) if comm.rank == culprit else "fine"
    objs = [lambda: None] * comm.size
    wrong = {
        "allgather_obj": lambda: comm.allgather_obj(obj),
        "gather_obj": lambda: comm.gather_obj(obj),
        "bcast_obj": lambda: comm.bcast_obj(obj, culprit),
        "scatter_obj": lambda: comm.scatter_obj(objs if comm.rank == culprit else None, culprit),
        # Named as the user called it, though it gathers first.
        "allreduce_obj": lambda: comm.allreduce_obj(obj),
    }
    for operation, call in wrong.items():
        assert_refused(comm, call, f"rank {culprit}", operation, "pickle", kind=torchmn.ArgumentError)


@ranks(1, 2, 3)
def test_scatter_refuses_another_number_of_objects_than_ranks(comm):
    root = comm.size - 1
    for objs in ([], [1] * (comm.size + 1), None, 7):
        call = lambda objs=objs: comm.scatter_obj(objs if comm.rank == root else None, root)  # noqa: E731
        assert_refused(comm, call, f"rank {root}", "scatter_obj", str(comm.size), kind=torchmn.ArgumentError)
