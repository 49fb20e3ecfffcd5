"""Micro-batches: the numbers of the whole batch, in pieces of any size, and unsupported uses."""

import warnings

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests.graph.replica import Spec, assert_equal_to_one_process
from tests.graph.test_patterns import branching, crossing, fan, ring, twisting
from torchmn.errors import GraphError
from torchmn.graph import MultiNodeChainList
from torchmn.graph.microbatches import cut


def line(size: int) -> list[Spec]:
    return [
        Spec(rank, rank - 1 if rank else None, rank + 1 if rank + 1 < size else None, "tuple") for rank in range(size)
    ]


@ranks(2, 3, 4, on=("threads", "mpi"))
@pytest.mark.parametrize("rows", [8, 7, 3, 1, 0], ids="rows{}".format)
def test_a_pipeline_gives_the_numbers_of_one_batch(comm, rows):
    """7 rows make micro-batches of 2, 2, 2 and 1; 3 rows make 3 of them, and 0 make empty ones."""
    if rows:
        assert_equal_to_one_process(comm, line(comm.size), microbatches=4, rows=rows, iterations=5)
    chain = MultiNodeChainList.from_sequential(nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)]), comm)
    chain.microbatches = 4
    y = chain(torch.ones(rows, 2))
    assert y.shape == ((rows, 2) if comm.rank == comm.size - 1 else ())
    y.sum().backward()


@ranks(2, 3, 4, on="threads")
@pytest.mark.parametrize("microbatches", [2, 5])
def test_branches_skips_and_rings_give_the_numbers_of_one_batch(comm, microbatches):
    size = comm.size
    for specs in (
        ring(size),
        crossing(size),
        branching(size, [*range(1, size), 0]),
        twisting(size),
        fan(size, "dict"),
        [*line(size), Spec(0, None, size - 1), Spec(size - 1, [0], None)],
    ):
        assert_equal_to_one_process(comm, specs, microbatches=microbatches, rows=7)


@ranks(2, on="mpi")
def test_branches_and_rings_over_mpi(comm):
    for specs in (ring(2), crossing(2), twisting(2), fan(2, "dict")):
        assert_equal_to_one_process(comm, specs, microbatches=3, rows=7, iterations=20)


class Rows(nn.Module):
    """A custom layer that cannot be computed on an empty batch."""

    def forward(self, x):
        return x.view(x.size(0), -1).mul(x.new_tensor(2.0))


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("rows", [3, 1, 4, 9], ids="rows{}".format)
def test_a_batch_of_fewer_rows_than_micro_batches_makes_no_empty_ones(comm, rows):
    stages = nn.Sequential(*[Rows() for _ in range(comm.size)])
    chain = MultiNodeChainList.from_sequential(stages, comm, [1] * comm.size, microbatches=4)
    for _ in range(2):
        x = torch.arange(2.0 * rows).view(rows, 2, 1).requires_grad_()
        y = chain(x) if comm.rank == 0 else chain()
        y.sum().backward()
        if comm.rank == comm.size - 1:
            assert torch.equal(y, x.view(rows, 2) * 2.0**comm.size)
        if comm.rank == 0:
            assert torch.equal(x.grad, torch.full_like(x, 2.0**comm.size))


def two_stages(comm, first: nn.Module, second: nn.Module, microbatches: int) -> MultiNodeChainList:
    chain = MultiNodeChainList(comm, microbatches)
    chain.add_link(*((first, None, 1) if comm.rank == 0 else (second, 0, None)))
    return chain


@ranks(1, on="solo")
def test_layers_that_depend_on_the_batch_are_named_once_and_in_training_only(comm):
    chain = MultiNodeChainList(comm, microbatches=2)
    chain.add_link(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2)), None, 0)
    chain.add_link(nn.InstanceNorm1d(2), 0, 0)
    chain.add_link(nn.BatchNorm1d(2), 0, None)
    x = torch.randn(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain.eval()(x)
    chain.train()
    named = r"rank 0 of 1: with microbatches=2 .*: component 0: 1 \(BatchNorm1d\), component 2: the module itself"
    with pytest.warns(UserWarning, match=named) as caught:
        chain(x)
    assert "component 1" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chain(x)


class Total(nn.Module):
    def forward(self, x):
        return x.sum()


class Turned(nn.Module):
    def forward(self, x):
        return x.T


@pytest.mark.parametrize(("last", "shape"), [(Total, r"\(\)"), (Turned, r"\(3, 2\)")])
def test_an_output_without_a_batch_dim_raises(last, shape):
    """Joining along the first dim would give meaningless numbers; rank 1 gets the number of rows from rank 0."""
    expected = rf"rank 1's component 0 \({last.__name__}\): expected the 2 rows.*{shape}"
    with pytest.raises(GraphError, match=expected):
        torchmn.run_threads(lambda comm: two_stages(comm, nn.Identity(), last(), 2)(torch.ones(4, 3)), 2)


@ranks(1, on="solo")
def test_inputs_of_different_length_are_refused(comm):
    chain = MultiNodeChainList(comm, microbatches=2)
    chain.add_link(nn.Bilinear(2, 2, 1))
    with pytest.raises(GraphError, match=r"one number of rows .* got \(4, 2\), \(3, 2\)"):
        chain(torch.ones(4, 2), torch.ones(3, 2))


def test_a_batch_is_cut_evenly_and_other_values_are_in_every_micro_batch():
    x, scale = torch.arange(7.0), torch.tensor(2.0)
    pieces = cut((x, {"scale": scale, "name": "a"}), 3)
    assert [rows for _, rows in pieces] == [3, 2, 2]
    assert torch.equal(torch.cat([arguments[0] for arguments, _ in pieces]), x)
    assert all(arguments[1] == {"scale": scale, "name": "a"} for arguments, _ in pieces)
