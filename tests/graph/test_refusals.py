"""Graphs that cannot run: an error on every rank, before anything is sent, that names both ends."""

import numpy as np
import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from torchmn.errors import ArgumentError, GraphError
from torchmn.graph import MultiNodeChainList, describe


def chain_of(comm, links: dict[int, list[tuple]]) -> MultiNodeChainList:
    """A chain with a Linear for each (rank_in, rank_out) of this rank."""
    chain = MultiNodeChainList(comm)
    for rank_in, rank_out in links.get(comm.rank, []):
        chain.add_link(nn.Linear(2, 2), rank_in, rank_out)
    return chain


def assert_graph_refused(comm, links, *words: str) -> None:
    chain = chain_of(comm, links)
    assert_refused(comm, lambda: chain(torch.ones(1, 2)), f"rank {comm.rank} of {comm.size}", *words, kind=GraphError)
    assert all(word in describe(chain) for word in words)


@ranks(2, 3, on=("threads", "mpi"))
def test_a_send_without_a_receive(comm):
    words = (
        "rank 0 sends to rank 1 once (rank_out=1: component 0 (Linear))",
        "rank 1 receives from rank 0 not at all (rank_in=0: none)",
        "missing rank_in=0 on rank 1",
    )
    assert_graph_refused(comm, {0: [(None, 1)], 1: [(None, None)]}, *words)


@ranks(2, 3, on="threads")
def test_a_receive_without_a_send(comm):
    words = (
        "rank 0 sends to rank 1 once (rank_out=1: component 1 (Linear))",
        "rank 1 receives from rank 0 2 times (rank_in=0: component 0 (Linear), component 0 (Linear))",
        "missing rank_out=1 on rank 0",
    )
    assert_graph_refused(comm, {0: [(None, None), (None, 1)], 1: [([0, 0], None)]}, *words)


@ranks(1, 2, on="threads")
def test_an_input_from_the_own_rank_without_an_output(comm):
    words = (
        "rank 0 keeps a value for itself not at all (rank_out=0: none)",
        "takes one from itself once (rank_in=0: component 1",
    )
    assert_graph_refused(comm, {0: [(None, None), (0, None)]}, *words)


@ranks(2, 3, on="threads")
def test_a_cycle_that_can_never_run(comm):
    words = (
        "a cycle can never run",
        "rank 0's component 0 (Linear) waits for rank 1's component 0 (Linear), which waits for rank 0's component 0",
    )
    assert_graph_refused(comm, {0: [(1, 1), (None, None)], 1: [(0, 0)]}, *words)


@ranks(1, 2, on="threads")
def test_a_component_that_waits_for_itself(comm):
    assert_graph_refused(comm, {0: [(0, 0)]}, "rank 0's component 0 (Linear) waits for rank 0's component 0 (Linear)")


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_out_of_range(comm, rank):
    words = (f"rank 1's component 0 (Linear) has rank_out {rank}: expected ranks in 0..{comm.size - 1}",)
    assert_graph_refused(comm, {0: [(None, None)], 1: [(None, [0, rank])]}, *words)


@ranks(2, on="threads")
def test_all_problems_are_named_at_once(comm):
    chain = chain_of(comm, {0: [(None, 1), (0, None)], 1: [(None, 7)]})
    with pytest.raises(GraphError) as caught:
        chain(torch.ones(1, 2))
    assert str(caught.value).count("\n  - ") == 3


@ranks(2, 3, on=("threads", "mpi"))
def test_a_graph_that_one_rank_alone_changed_is_checked_again_by_all(comm):
    chain = chain_of(comm, {0: [(None, 1)], 1: [(0, None)]})
    x = torch.ones(3, 2)
    chain(x).sum().backward()
    if comm.rank == 1:
        chain.add_link(nn.Linear(2, 2), 0, None)
    assert_refused(comm, lambda: chain(x), "receives from rank 0 2 times", kind=GraphError)
    if comm.rank == 0:
        chain.add_link(nn.Linear(2, 2), None, 1)
    outputs = chain(x)
    if comm.rank == 1:
        assert [y.shape for y in outputs] == [(3, 2), (3, 2)]
        outputs = outputs[0] + outputs[1]
    outputs.sum().backward()
    assert all(p.grad.abs().sum() > 0 for module in chain for p in module.parameters())


@ranks(2, on="threads")
def test_another_number_of_micro_batches_on_one_rank(comm):
    chain = chain_of(comm, {0: [(None, 1)], 1: [(0, None)]})
    chain(torch.ones(4, 2)).sum().backward()
    if comm.rank == 1:
        chain.microbatches = 2
    assert_refused(comm, lambda: chain(torch.ones(4, 2)), "got 1 on rank 0, 2 on rank 1", kind=GraphError)
    chain.microbatches = 2
    chain(torch.ones(4, 2)).sum().backward()


@ranks(1, on="solo")
@pytest.mark.parametrize("wrong", ["1", 0.5, True, [0, "a"], object()])
def test_arguments_that_are_not_ranks(comm, wrong):
    chain = MultiNodeChainList(comm)
    with pytest.raises(ArgumentError, match="expected rank_in to be a rank"):
        chain.add_link(nn.Identity(), rank_in=wrong)
    with pytest.raises(ArgumentError, match="expected rank_out to be a rank"):
        chain.add_link(nn.Identity(), rank_out=wrong)
    assert len(chain) == 0


@ranks(1, on="solo")
def test_the_error_for_none_in_a_list_of_ranks_recommends_the_own_rank(comm):
    chain = MultiNodeChainList(comm)
    with pytest.raises(ArgumentError, match=r"got \[0, None\].*add_link\(nn.Identity\(\), rank_in=None, rank_out=own"):
        chain.add_link(nn.Bilinear(2, 2, 2), rank_in=[0, None])
    with pytest.raises(ArgumentError, match=r"got \[0, None\].*add_link\(nn.Identity\(\), rank_in=own rank"):
        chain.add_link(nn.Linear(2, 2), rank_out=(0, None))


@ranks(2, on="threads")
def test_numpy_integers_and_ranges_are_ranks(comm):
    chain = MultiNodeChainList(comm)
    if comm.rank == 0:
        chain.add_link(nn.Identity(), None, np.int64(1))
    else:
        chain.add_link(nn.Identity(), range(1), None)
    result = chain(torch.arange(3.0))
    assert result.tolist() == ([0.0, 1.0, 2.0] if comm.rank else 0.0)


@ranks(1, on="solo")
def test_wrong_modules_communicators_and_numbers(comm):
    with pytest.raises(ArgumentError, match=r"expected a torch\.nn\.Module"):
        MultiNodeChainList(comm).add_link(torch.tanh)
    with pytest.raises(ArgumentError, match="expected comm to be a communicator"):
        MultiNodeChainList(3)
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(ArgumentError, match="expected microbatches to be an int >= 1"):
            MultiNodeChainList(comm, microbatches=wrong)


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, *_):
        return self.value


def test_the_error_for_a_payload_that_cannot_be_sent_names_its_path_and_its_edge():
    def body(comm):
        chain = MultiNodeChainList(comm)
        value = {"state": [torch.ones(2), {1, 2}]}
        chain.add_link(Returns(value), *((None, 1) if comm.rank == 0 else (0, None)))
        chain()

    with pytest.raises(GraphError, match=r"rank 0's component 0 \(Returns\) sends to rank 1's") as caught:
        torchmn.run_threads(body, 2)
    assert "['state'][1]: expected tensors" in str(caught.value)


@ranks(1, on="solo")
def test_any_object_may_stay_on_its_rank_and_be_an_output(comm):
    chain = MultiNodeChainList(comm)
    thing = object()
    chain.add_link(Returns(thing), None, 0)
    chain.add_link(nn.Identity(), 0, None)
    assert chain() is thing
