"""Common patterns of graphs, each trained for many steps: every gradient is that of one process."""

import pytest

from tests._worlds import ranks
from tests.graph.replica import SHAPES, Spec, assert_equal_to_one_process

STEPS = 100
worlds = ranks(2, 3, 4, on=("threads", "mpi"))


def ring(size: int) -> list[Spec]:
    """Round all ranks and back to rank 0."""
    return [
        Spec(0, None, 1),
        Spec(0, size - 1, None),
        *[Spec(rank, rank - 1, (rank + 1) % size) for rank in range(1, size)],
    ]


def crossing(size: int) -> list[Spec]:
    """Each rank sends to the next one before it receives from the previous one."""
    return [
        spec
        for rank in range(size)
        for spec in (Spec(rank, None, (rank + 1) % size), Spec(rank, (rank - 1) % size, None))
    ]


def branching(size: int, order: list[int]) -> list[Spec]:
    """Rank 0 gives its result to all ranks in `order`, itself included, and takes all of theirs, in the same order."""
    branches = [Spec(rank, 0, 0) for rank in range(1, size)]
    return [Spec(0, None, order), *branches, Spec(0, order, None)]


def twisting(size: int) -> list[Spec]:
    """Messages in both directions between neighbours, and two values that each rank keeps for itself."""
    specs = [Spec(0, None, [1, 0]), Spec(0, None, 0), Spec(0, [0, 1, 0], None)]
    for rank in range(1, size):
        onward = [rank + 1] if rank + 1 < size else []
        specs += [
            Spec(rank, rank - 1, [rank, *onward]),
            Spec(rank, None, [rank, rank - 1]),
            Spec(rank, [rank, *onward, rank], None),
        ]
    return specs


def fan(size: int, shape: str) -> list[Spec]:
    """Rank 0 to all others, twice to the last, and all of them to the last rank, which has two outputs."""
    last = size - 1
    others = list(range(1, size))
    return [
        Spec(0, None, [*others, last], shape),
        *[Spec(rank, 0, last, shape) for rank in others if rank != last],
        Spec(last, [0, 0], last, shape),
        Spec(last, [*range(1, last), last], None, shape),
        Spec(last, None, None, shape),
    ]


@worlds
@ranks(2, on="gloo")
def test_a_ring(comm):
    assert_equal_to_one_process(comm, ring(comm.size), iterations=STEPS)


@worlds
@ranks(2, on="gloo")
def test_crossing_sends(comm):
    assert_equal_to_one_process(comm, crossing(comm.size), iterations=STEPS)


@worlds
@pytest.mark.parametrize("own", ["first", "last", "rotated"])
def test_branches_with_the_own_rank(comm, own):
    others = list(range(1, comm.size))
    order = {"first": [0, *others], "last": [*others, 0], "rotated": [*others[1:], 0, others[0]]}[own]
    assert_equal_to_one_process(comm, branching(comm.size, order), iterations=STEPS)


@worlds
def test_twisting_both_directions_and_values_kept_twice(comm):
    assert_equal_to_one_process(comm, twisting(comm.size), iterations=STEPS)


@worlds
@pytest.mark.parametrize("shape", SHAPES)
def test_fan_out_and_in_of_any_payload(comm, shape):
    assert_equal_to_one_process(comm, fan(comm.size, shape), iterations=STEPS if shape in ("tuple", "dict") else 5)


@worlds
@pytest.mark.parametrize("shape", ["tensor", "dict"])
def test_a_component_that_ignores_an_input(comm, shape):
    specs = [
        Spec(0, None, [1, 1], shape),
        Spec(1, [0, 0], 0, shape, ignores=(0,)),
        Spec(0, [1], None, ignores=(0,)),
    ]
    assert_equal_to_one_process(comm, specs, iterations=10)


@worlds
def test_a_rank_with_several_outputs_of_which_the_loss_uses_one(comm):
    specs = [
        Spec(0, None, None),
        Spec(0, None, 1, "tuple"),
        Spec(1, 0, 0),
        Spec(0, 1, None, "dict"),
        Spec(0, None, None),
    ]
    assert_equal_to_one_process(comm, specs, iterations=10, ignore_outputs=2)


@worlds
def test_any_number_of_model_inputs_for_any_component(comm):
    specs = [Spec(0, None, 1), Spec(1, [0], 0), Spec(0, None, 0), Spec(0, [1, 0], None), Spec(1, None, None)]
    for arguments in (0, 1, 3):
        assert_equal_to_one_process(comm, specs, iterations=3, arguments=arguments)


@worlds
def test_the_order_of_add_link_need_not_be_that_of_the_data(comm):
    """Rank 0 adds the receiver before the sender: a hang if components ran in the order in which they were added."""
    specs = [Spec(0, 1, None), Spec(0, None, [1, 0]), Spec(0, 0, None), Spec(1, 0, 0)]
    assert_equal_to_one_process(comm, specs, iterations=5)


@ranks(1, on=("solo", "threads"))
def test_one_rank_that_keeps_everything(comm):
    specs = [Spec(0, None, [0, 0], "dict"), Spec(0, 0, 0), Spec(0, [0, 0], None), Spec(0, [], None)]
    assert_equal_to_one_process(comm, specs, iterations=10)
