"""A wrong argument on one rank is an error on every rank, and the communicator still works."""

import pytest
import torch

import torchmn
from tests._worlds import every_world_of_several, ranks
from tests._worlds.data import assert_refused

ONES = torch.ones(3)
NESTED = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)])


def wrong_arguments(comm) -> list[tuple]:
    """(operation, what the last rank calls, what the others call, words of the error): one slip each."""
    n = comm.size
    parts = [torch.ones(2)] * n
    mixed = [*parts[1:], ONES.double()] if n > 1 else [ONES.to("meta")]
    return [
        ("allreduce", lambda: comm.allreduce("text"), lambda: comm.allreduce(ONES), ("tensor", "'text'")),
        ("allreduce", lambda: comm.allreduce(None), lambda: comm.allreduce(ONES), ("tensor", "None")),
        ("allreduce", lambda: comm.allreduce([ONES]), lambda: comm.allreduce(ONES), ("tensor", "list")),
        ("allreduce", lambda: comm.allreduce(ONES, "avg"), lambda: comm.allreduce(ONES), ("'avg'", "mean")),
        ("allreduce", lambda: comm.allreduce(ONES.to_sparse()), lambda: comm.allreduce(ONES), ("sparse",)),
        ("allreduce", lambda: comm.allreduce(ONES.to("meta")), lambda: comm.allreduce(ONES), ("meta",)),
        ("allreduce", lambda: comm.allreduce(NESTED), lambda: comm.allreduce(ONES), ("nested", "unbind")),
        ("allgather", lambda: comm.allgather((ONES,)), lambda: comm.allgather(ONES), ("tensor", "tuple")),
        ("gather", lambda: comm.gather(3.0), lambda: comm.gather(ONES), ("tensor", "3.0")),
        ("gather", lambda: comm.gather(ONES, n), lambda: comm.gather(ONES), ("root", str(n))),
        ("bcast", lambda: comm.bcast("text", n - 1), lambda: comm.bcast(None, n - 1), ("tensor", "'text'")),
        ("bcast", lambda: comm.bcast(None, n - 1), lambda: comm.bcast(None, n - 1), ("tensor", "None")),
        ("bcast", lambda: comm.bcast(ONES, -1), lambda: comm.bcast(ONES), ("root", "-1")),
        ("bcast", lambda: comm.bcast(ONES, "0"), lambda: comm.bcast(ONES), ("root", "'0'")),
        ("bcast", lambda: comm.bcast(ONES, [0]), lambda: comm.bcast(ONES), ("root",)),
        (
            "scatter",
            lambda: comm.scatter(parts[1:], n - 1),
            lambda: comm.scatter(None, n - 1),
            (str(n), str(n - 1)),
        ),
        ("scatter", lambda: comm.scatter(None, n - 1), lambda: comm.scatter(None, n - 1), (str(n), "None")),
        (
            "scatter",
            lambda: comm.scatter(torch.ones(n + 1, 2), n - 1),
            lambda: comm.scatter(None, n - 1),
            (str(n),),
        ),
        (
            "scatter",
            lambda: comm.scatter(torch.tensor(1.0), n - 1),
            lambda: comm.scatter(None, n - 1),
            (str(n),),
        ),
        ("scatter", lambda: comm.scatter([*parts[1:], 7], n - 1), lambda: comm.scatter(None, n - 1), ("7",)),
        (
            "alltoall",
            lambda: comm.alltoall([*parts, ONES]),
            lambda: comm.alltoall(parts),
            (str(n), str(n + 1)),
        ),
        ("alltoall", lambda: comm.alltoall(ONES[:0]), lambda: comm.alltoall(parts), (str(n),)),
        ("alltoall", lambda: comm.alltoall([*parts[1:], "x"]), lambda: comm.alltoall(parts), ("'x'",)),
        ("alltoall", lambda: comm.alltoall(mixed), lambda: comm.alltoall(parts), ("got",)),
        ("reduce_scatter", lambda: comm.reduce_scatter(mixed), lambda: comm.reduce_scatter(parts), ("got",)),
        ("scatter", lambda: comm.scatter(mixed, n - 1), lambda: comm.scatter(None, n - 1), ("got",)),
        (
            "reduce_scatter",
            lambda: comm.reduce_scatter(parts[1:]),
            lambda: comm.reduce_scatter(parts),
            (str(n),),
        ),
        (
            "reduce_scatter",
            lambda: comm.reduce_scatter(parts, "xor"),
            lambda: comm.reduce_scatter(parts),
            ("'xor'",),
        ),
        ("reduce_scatter", lambda: comm.reduce_scatter(5), lambda: comm.reduce_scatter(parts), (str(n), "5")),
        ("bcast_obj", lambda: comm.bcast_obj(1, n), lambda: comm.bcast_obj(1), ("root", str(n))),
        ("gather_obj", lambda: comm.gather_obj(1, -2), lambda: comm.gather_obj(1), ("root", "-2")),
        (
            "scatter_obj",
            lambda: comm.scatter_obj([1] * n, 1.0),
            lambda: comm.scatter_obj([1] * n),
            ("root", "1.0"),
        ),
    ]


def disagreements(comm) -> list[tuple]:
    """(operation, what the last rank calls, what the others call, words): right alone, wrong together."""
    n = comm.size
    parts = [torch.ones(2)] * n
    longer = [*parts[1:], torch.ones(3)]
    return [
        ("allreduce", lambda: comm.allreduce(torch.ones(4)), lambda: comm.allreduce(ONES), ("(4,)", "(3,)")),
        ("allreduce", lambda: comm.allreduce(torch.ones(1, 3)), lambda: comm.allreduce(ONES), ("(1, 3)",)),
        (
            "allreduce",
            lambda: comm.allreduce(ONES.double()),
            lambda: comm.allreduce(ONES),
            ("float64", "float32"),
        ),
        ("allreduce", lambda: comm.allreduce(ONES.int()), lambda: comm.allreduce(ONES), ("int32", "float32")),
        ("allreduce", lambda: comm.allreduce(ONES, "max"), lambda: comm.allreduce(ONES), ("max", "sum")),
        (
            "allgather",
            lambda: comm.allgather(ONES.double()),
            lambda: comm.allgather(ONES),
            ("float64", "float32"),
        ),
        ("allgather", lambda: comm.allgather(ONES[:0].half()), lambda: comm.allgather(ONES), ("float16",)),
        ("gather", lambda: comm.gather(ONES.long()), lambda: comm.gather(ONES), ("int64", "float32")),
        ("gather", lambda: comm.gather(ONES, 1), lambda: comm.gather(ONES, 0), ("root",)),
        ("bcast", lambda: comm.bcast(ONES, 1), lambda: comm.bcast(ONES, 0), ("root",)),
        ("scatter", lambda: comm.scatter(parts, 1), lambda: comm.scatter(parts, 0), ("root",)),
        (
            "alltoall",
            lambda: comm.alltoall([part.double() for part in parts]),
            lambda: comm.alltoall(parts),
            ("float64", "float32"),
        ),
        (
            "reduce_scatter",
            lambda: comm.reduce_scatter(longer),
            lambda: comm.reduce_scatter(parts),
            ("(3,)",),
        ),
        (
            "reduce_scatter",
            lambda: comm.reduce_scatter(parts, "min"),
            lambda: comm.reduce_scatter(parts),
            ("min",),
        ),
        ("bcast_obj", lambda: comm.bcast_obj(1, 1), lambda: comm.bcast_obj(1, 0), ("root",)),
        ("gather_obj", lambda: comm.gather_obj(1, 1), lambda: comm.gather_obj(1, 0), ("root",)),
        ("scatter_obj", lambda: comm.scatter_obj([1] * n, 1), lambda: comm.scatter_obj([1] * n), ("root",)),
        ("allreduce", lambda: comm.allgather(ONES), lambda: comm.allreduce(ONES), ("allgather", "different")),
        ("barrier", lambda: comm.barrier(), lambda: comm.bcast(ONES), ("bcast", "different")),
        (
            "allgather_obj",
            lambda: comm.allgather_obj(1),
            lambda: comm.bcast_obj(1),
            ("bcast_obj", "different"),
        ),
        ("split", lambda: comm.split(0), lambda: comm.barrier(), ("barrier", "different")),
        (
            "bcast_data",
            lambda: comm.bcast_data(torch.nn.Linear(1, 1)),
            lambda: comm.multi_node_mean_grad(torch.nn.Linear(1, 1)),
            ("multi_node_mean_grad", "different"),
        ),
    ]


@every_world_of_several
@ranks(2, on="openmpi")
def test_a_wrong_argument_on_one_rank_is_refused_on_every_rank(comm):
    last = comm.size - 1
    for operation, wrong, right, words in wrong_arguments(comm):
        call = wrong if comm.rank == last else right
        assert_refused(comm, call, f"rank {last}", operation, "expected", *words, kind=torchmn.ArgumentError)


@every_world_of_several
@ranks(2, on="openmpi")
def test_an_error_on_ranks_that_disagree_names_the_values_of_each(comm):
    last = comm.size - 1
    for operation, other, usual, words in disagreements(comm):
        call = other if comm.rank == last else usual
        assert_refused(comm, call, f"rank {last}", operation, *words, kind=torchmn.MismatchError)


@ranks(2, 3)
def test_an_error_names_the_line_of_the_wrong_call(comm):
    assert_refused(comm, lambda: comm.allreduce("x" if comm.rank == 0 else ONES), "test_bad_input.py")


@ranks(1)
def test_a_single_rank_refuses_what_many_refuse(comm):
    for operation, wrong, _, words in wrong_arguments(comm):
        assert_refused(comm, wrong, "rank 0", operation, "expected", *words, kind=torchmn.ArgumentError)


@ranks(1)
def test_the_error_of_a_send_without_a_launcher_names_how_to_start_ranks(comm):
    for call in (lambda: comm.send(ONES, 1), lambda: comm.recv(1), lambda: comm.bcast(ONES, root=1)):
        assert_refused(comm, call, "there is only one rank; `torchmn run -n N script.py` or mpiexec starts more")


@ranks(2, 3)
def test_an_argument_that_python_itself_refuses_does_not_harm_the_communicator(comm):
    with pytest.raises(TypeError):
        comm.allreduce()
    with pytest.raises(TypeError):
        comm.allreduce(ONES, operation="sum")
    assert comm.allreduce(ONES).tolist() == [comm.size] * 3
