"""from_sequential: an nn.Sequential over ranks, in balanced stages."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests._worlds import ranks
from tests._worlds.data import assert_refused
from torchmn.errors import ArgumentError, GraphError, MismatchError
from torchmn.graph import MultiNodeChainList
from torchmn.graph.sequential import balanced, seconds


def model_of(layers: int) -> nn.Sequential:
    """The same weights on every rank, and a layer that occurs several times."""
    model, tanh = nn.Sequential(), nn.Tanh()
    for n in range(layers):
        linear = nn.Linear(3, 3, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.eye(3) + 0.1 * torch.arange(9).view(3, 3).sin() * (n + 1))
            linear.bias.fill_(0.1 * n)
        model.append(linear)
        model.append(tanh)
    return model


@ranks(1, 2, 3, 4, on=("threads", "mpi"))
@pytest.mark.parametrize("balance", ["parameters", "time", "list"])
def test_output_and_gradients_are_those_of_the_model_in_one_piece(comm, balance):
    whole, model = model_of(4), model_of(4)
    if balance == "list":
        balance = [8 - 2 * (comm.size - 1)] + [2] * (comm.size - 1)
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    chain = MultiNodeChainList.from_sequential(model, comm, balance, sample=x, microbatches=2)
    expected = whole(x)
    expected.square().mean().backward()
    y = chain(x)
    if comm.rank == comm.size - 1:
        torch.testing.assert_close(y, expected)
        y = y.square().mean()
    y.backward()
    known = dict(whole.named_parameters())
    mine = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter.grad, known[name].grad)
    held = comm.allgather_obj([key.removeprefix("0.") for key in chain.state_dict()])
    assert [key for keys in held for key in keys] == list(whole.state_dict())
    assert sorted(mine) == sorted(held[comm.rank])


@ranks(3, on="threads")
def test_a_rank_without_layers_is_passed_over(comm):
    model = model_of(2)
    chain = MultiNodeChainList.from_sequential(model, comm, [2, 0, 2])
    assert len(chain) == (0 if comm.rank == 1 else 1)
    y = chain(torch.ones(2, 3, dtype=torch.float64))
    assert y.shape == ((2, 3) if comm.rank == 2 else ())
    y.sum().backward()


@ranks(2, on="threads")
def test_layers_that_work_in_place_are_measured_and_leave_the_sample_as_it_is(comm):
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Hardtanh())
    sample = torch.linspace(-1, 1, 15).view(5, 3)
    chain = MultiNodeChainList.from_sequential(model, comm, "time", sample=sample)
    assert sample.min() == -1
    y = chain(sample.clone())
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in chain.parameters())


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 4))
def test_the_slowest_stage_is_as_quick_as_can_be(costs, parts):
    if len(costs) < parts:
        return
    sizes = balanced(costs, parts)
    assert len(sizes) == parts and sum(sizes) == len(costs) and min(sizes) > 0
    assert slowest(costs, sizes) == min(slowest(costs, other) for other in every_cut(len(costs), parts))


def slowest(costs, sizes) -> float:
    return max(sum(costs[sum(sizes[:n]) : sum(sizes[: n + 1])]) for n in range(len(sizes)))


def every_cut(layers: int, parts: int):
    if parts == 1:
        return [(layers,)]
    return [(first, *rest) for first in range(1, layers - parts + 2) for rest in every_cut(layers - first, parts - 1)]


def test_measuring_leaves_the_model_and_the_generator_as_they_were():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(7)
    costs = seconds(model, torch.ones(3, 4))
    assert torch.equal(torch.rand(3), torch.manual_seed(7) and torch.rand(3))
    assert len(costs) == 4 and min(costs) > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_costly_layer_counts_as_such():
    class Heavy(nn.Module):
        def forward(self, x):
            for _ in range(200):
                x = x.cos()
            return x

    costs = seconds(nn.Sequential(nn.Identity(), Heavy(), nn.Identity()), torch.ones(50, 50, requires_grad=True))
    assert costs.index(max(costs)) == 1


@ranks(2, 3, on="threads")
@pytest.mark.parametrize(
    ("balance", "words"),
    [
        ("times", "Did you mean 'time'?"),
        ("time", "pass it as sample="),
        ([1, 1, 1, 1], "add up to 4 layers"),
        ([5, -1], "list of ints >= 0"),
        (7, "expected balance to be"),
    ],
)
def test_a_wrong_balance_on_one_rank_is_an_error_on_all(comm, balance, words):
    mine = balance if comm.rank == 0 else "parameters"
    assert_refused(comm, lambda: MultiNodeChainList.from_sequential(model_of(2), comm, mine), words, kind=ArgumentError)


@ranks(2, on="threads")
def test_another_balance_or_other_layers_on_one_rank_are_an_error_on_all(comm):
    def cut(model, balance):
        return lambda: MultiNodeChainList.from_sequential(model, comm, balance)

    assert_refused(comm, cut(model_of(2), [comm.rank + 1, 3 - comm.rank]), "balance (2, 2)", kind=MismatchError)
    wider = nn.Sequential(nn.Linear(3, 3 + comm.rank), nn.Linear(3 + comm.rank, 3))
    assert_refused(comm, cut(wider, "parameters"), "Linear (4, 3) (4,)", kind=MismatchError)


@ranks(2, 3, on="threads")
def test_a_sample_that_does_not_fit_is_an_error_on_every_rank(comm):
    sample = torch.ones(2, 99) if comm.rank == 0 else None
    call = lambda: MultiNodeChainList.from_sequential(model_of(2), comm, "time", sample=sample)  # noqa: E731
    assert_refused(comm, call, "rank 0", "the layers raised on sample: RuntimeError", kind=ArgumentError)


@ranks(3, on="threads")
def test_fewer_layers_than_ranks_and_what_is_no_sequential(comm):
    refused = (
        (nn.Sequential(nn.Identity(), nn.Identity()), "at least as many layers as ranks (3), got 2"),
        (nn.Linear(1, 1), "expected an nn.Sequential"),
    )
    for model, words in refused:
        assert_refused(comm, lambda model=model: MultiNodeChainList.from_sequential(model, comm), words)


@ranks(2, on="threads")
def test_a_parameter_that_two_ranks_would_share_is_refused(comm):
    tied = nn.Linear(2, 2)
    model = nn.Sequential(tied, nn.Linear(2, 2), tied)
    with pytest.raises(GraphError, match=r"'0\.weight' on rank 0 and '2\.weight' on rank 1 are one parameter"):
        MultiNodeChainList.from_sequential(model, comm, [1, 2])
