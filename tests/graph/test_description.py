"""The graph as data, as a plan, as text and as a picture."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from torch import nn

from tests._worlds import ranks
from tests.graph.replica import ends
from tests.graph.test_random_graphs import graphs
from torchmn.errors import TorchMNError
from torchmn.graph import MultiNodeChainList, describe, draw
from torchmn.graph.description import Component, connect
from torchmn.graph.picture import columns_of
from torchmn.graph.schedule import schedule


def build(size: int, links) -> object:
    """The graph of (rank, rank_in, rank_out) in the order of add_link."""
    places = dict.fromkeys(range(size), -1)
    components = []
    for rank, rank_in, rank_out in links:
        places[rank] += 1
        sides = [None if side is None else tuple(ends(side)) for side in (rank_in, rank_out)]
        components.append(Component(rank, places[rank], f"M{len(components)}", *sides))
    return connect(components, size)


def test_a_line_of_ranks_runs_in_the_order_of_gpipe():
    graph = build(3, [(0, None, 1), (1, 0, 2), (2, 1, None)])
    assert [[task.microbatch for task in tasks] for tasks in schedule(graph, 4)] == [[0, 1, 2, 3]] * 3


def test_a_rank_works_on_the_next_micro_batch_while_it_waits_for_another_rank():
    graph = build(2, [(0, None, 1), (1, 0, 0), (0, 1, None)])
    order = [(task.place, task.microbatch) for task in schedule(graph, 3)[0]]
    assert order == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]


@given(graphs(), st.integers(1, 4))
def test_every_task_has_its_turn_and_no_plan_waits_for_ever(graph, microbatches):
    size, specs = graph
    built = build(size, [(spec.rank, spec.rank_in, spec.rank_out) for spec in specs])
    assert built.problems == ()
    plan = schedule(built, microbatches)
    assert sum(map(len, plan)) == len(specs) * microbatches == len({task for tasks in plan for task in tasks})
    # Run the plan: a rank continues when the inputs of its next task exist.
    at = {(component.rank, component.place): component for component in built.components}
    done, left = set(), [list(tasks) for tasks in plan]
    while any(left):
        before = len(done)
        for tasks in left:
            if tasks:
                needed = built.incoming[at[tasks[0].rank, tasks[0].place]]
                if all((edge.source, tasks[0].microbatch) in done for edge in needed):
                    done.add((at[tasks[0].rank, tasks[0].place], tasks.pop(0).microbatch))
        assert len(done) > before, "every rank waits"
    for tasks in plan:  # and each component meets its micro-batches in order, as messages on an edge do
        for place in {task.place for task in tasks}:
            assert [task.microbatch for task in tasks if task.place == place] == list(range(microbatches))


def small_chain(comm) -> MultiNodeChainList:
    chain = MultiNodeChainList(comm)
    if comm.rank == 0:
        chain.add_link(nn.Linear(1, 1), None, [1, 0])
        chain.add_link(nn.Bilinear(1, 1, 1), [0, 1], None)
    if comm.rank == 1:
        chain.add_link(nn.Tanh(), 0, 0)
    return chain


TEXT = """\
3 components on 3 ranks, 3 edges
rank 0
  0 Linear: model input -> own 1 Bilinear, rank 1: 0 Tanh
  1 Bilinear: own 0 Linear, rank 1: 0 Tanh -> model output
rank 1
  0 Tanh: rank 0: 0 Linear -> rank 0: 1 Bilinear
rank 2: no component, returns a delegate"""


@ranks(3, on=("threads", "mpi"))
def test_every_rank_gets_the_whole_graph_as_text(comm):
    assert describe(small_chain(comm)) == TEXT


@ranks(2, on="threads")
def test_a_graph_that_can_not_run_can_still_be_described(comm):
    chain = MultiNodeChainList(comm)
    chain.add_link(nn.Tanh(), *((None, 1) if comm.rank == 0 else ([1, 0, 0], 1)))
    text = describe(chain)
    assert "rank 0: 0 Tanh, rank 0, which sends nothing -> own 0 Tanh" in text
    assert text.count("cannot run: ") == 2


@ranks(1, 3, on="threads")
def test_a_picture_with_a_lane_for_each_rank(comm, tmp_path):
    chain = small_chain(comm) if comm.size > 1 else MultiNodeChainList(comm)
    draw(chain, tmp_path / "graph.png")
    comm.barrier()
    picture = imread(tmp_path / "graph.png")
    assert picture.shape[0] > 100 * comm.size and picture.std() > 0.01


def test_components_stand_right_of_what_they_wait_for():
    graph = build(2, [(0, None, [0, 1]), (1, 0, 0), (0, [0, 1], None), (0, None, None)])
    columns = {component.name: column for component, column in columns_of(graph).items()}
    assert columns == {"M0": 0, "M1": 1, "M2": 2, "M3": 1}


def test_components_of_a_cycle_have_a_place_too():
    graph = build(2, [(0, 1, 1), (1, 0, 0), (0, None, None)])
    columns = columns_of(graph)
    assert len(columns) == len({(component.rank, column) for component, column in columns.items()}) == 3


@ranks(2, on="threads")
def test_a_picture_that_can_not_be_written_is_an_error_on_every_rank(comm, tmp_path):
    with pytest.raises(TorchMNError, match="rank 0 of 2: draw to"):
        draw(small_chain(comm), tmp_path / "nowhere" / "graph.png")
