"""Gradients of a chain: clipped by the norm over all of its ranks, and averaged over none of them."""

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from torchmn.errors import ArgumentError, MismatchError


def layers() -> nn.Sequential:
    """The same on every rank and thread, whatever others draw at the same time."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.linspace(-1, 2, parameter.numel(), dtype=torch.float64)
            parameter.copy_(values.cos().view(parameter.shape))
    return model


X = torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3)


def chain_after_backward(comm) -> torchmn.MultiNodeChainList:
    chain = torchmn.MultiNodeChainList.from_sequential(layers(), comm, microbatches=2)
    y = chain(X)
    (y.square().sum() if comm.rank == comm.size - 1 else y).backward()
    return chain


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@ranks(1, 2, 3, on="threads")
def test_a_chain_is_clipped_by_the_norm_of_the_whole_model(comm, norm_type):
    serial = layers()
    serial(X).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(serial.parameters(), 0.5, norm_type)
    chain = chain_after_backward(comm)
    norm = torchmn.clip_grad_norm_(chain, 0.5, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    gradients = {name: p.grad for name, p in serial.named_parameters()}
    for name, parameter in chain.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name.partition(".")[2]], rtol=1e-10, atol=1e-14)


@ranks(2, on="threads")
def test_a_chain_inside_a_model_counts_over_its_ranks_and_the_rest_of_the_model_once(comm):
    model = nn.ModuleDict({"chain": chain_after_backward(comm), "head": nn.Linear(1, 1).double()})
    model["head"].weight.grad = torch.full((1, 1), 3.0, dtype=torch.float64)
    inside = torchmn.clip_grad_norm_(model["chain"], float("inf"))
    expected = (inside.square() + 9).sqrt()
    torch.testing.assert_close(torchmn.clip_grad_norm_(model, 0.1), expected, rtol=1e-12, atol=0)


@ranks(2, on="threads")
def test_ranks_that_clip_a_chain_otherwise_are_refused(comm):
    chain = chain_after_backward(comm)
    limit = 0.5 + comm.rank
    assert_refused(comm, lambda: torchmn.clip_grad_norm_(chain, limit), "max_norm", kind=MismatchError)


@ranks(2, on="threads")
def test_a_chain_with_a_parallel_component_is_refused(comm):
    chain = chain_after_backward(comm)
    alone = comm.split(comm.rank, 0)
    chain.add_module("extra", torchmn.parallelize(nn.Linear(4, 4), alone, "modelpar"))
    assert_refused(comm, lambda: torchmn.clip_grad_norm_(chain, 1.0), "went through parallelize", kind=ArgumentError)


@ranks(2, 4, on="threads")
def test_a_multi_node_optimizer_over_the_ranks_of_a_chain_is_refused(comm):
    pair, equals = comm.split(comm.rank // 2, comm.rank), comm.split(comm.rank % 2, comm.rank)
    chain = torchmn.MultiNodeChainList.from_sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), pair)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    words = ("hold different components", "Use the torch optimizer without wrapping it")
    for ranks_of_the_mean in (comm, pair):
        assert_refused(
            ranks_of_the_mean,
            lambda among=ranks_of_the_mean: torchmn.create_multi_node_optimizer(optimizer, among, model=chain),
            *words,
            kind=ArgumentError,
        )
    torchmn.create_multi_node_optimizer(optimizer, equals, model=chain)  # the same component: this is what it is for
