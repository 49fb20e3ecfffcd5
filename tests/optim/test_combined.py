"""Several optimizers as one: each steps its parameters, and state, groups and multi-node steps are those of one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import filled
from torchmn.errors import ArgumentError
from torchmn.optim import CombinedOptimizer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def parts_of(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adadelta(model[2].parameters(), rho=0.5),
    ]


def run(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 3) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.rand(8, 4, dtype=torch.float64)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_each_part_steps_its_parameters():
    one, other = network(), network()
    run(one, parts_of(one))
    run(other, [CombinedOptimizer(parts_of(other))])
    assert_same(one, other)


def test_a_saved_state_continues_bit_by_bit():
    whole, resumed = network(), network()
    optimizer = CombinedOptimizer(parts_of(whole))
    run(whole, [optimizer])
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(whole.state_dict())
    assert [len(saved["state"][n]) for n in range(4)] == [1, 1, 3, 3]
    run(whole, [optimizer])
    again = CombinedOptimizer(parts_of(resumed))
    resumed.load_state_dict(weights)
    again.load_state_dict(saved)
    run(resumed, [again])
    assert_same(whole, resumed)


def test_a_learning_rate_of_a_group_is_that_of_the_part_also_after_loading():
    model = network()
    optimizer = CombinedOptimizer(parts_of(model))
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model)
    run(model, [optimizer])
    assert_same(model, before)
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.0, 0.0]


def test_a_closure_is_called_once():
    model, calls = network(), []

    def closure() -> torch.Tensor:
        calls.append(1)
        model.zero_grad()
        loss = model(torch.ones(2, 4, dtype=torch.float64)).sum()
        loss.backward()
        return loss

    assert CombinedOptimizer(parts_of(model)).step(closure).requires_grad
    assert calls == [1]


def test_groups_cannot_be_added_and_the_optimizer_cannot_be_copied():
    optimizer = CombinedOptimizer(parts_of(network()))
    with pytest.raises(ArgumentError, match="which of SGD, Adadelta would step these parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ArgumentError, match=r"save its state_dict\(\)"):
        copy.deepcopy(optimizer)


@ranks(3)
def test_ranks_step_with_the_mean_as_one_rank_with_the_whole_batch(comm):
    alone, model = filled(network(), 0), filled(network(), 0)
    images = torch.rand(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    single = CombinedOptimizer(parts_of(alone))
    optimizer = torchmn.create_multi_node_optimizer(CombinedOptimizer(parts_of(model)), comm)
    for _ in range(3):
        for net, stepped, batch in ((alone, single, images), (model, optimizer, images[comm.rank * 3 :][:3])):
            stepped.zero_grad()
            net(batch).square().mean().backward()
            stepped.step()
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@ranks(2)
def test_parts_of_other_kinds_than_element_by_element_are_an_error_for_slices(comm):
    model = torchmn.parallelize(network().float(), comm, mode="modelpar", input_shape=(4,))
    parameters = list(model.parameters())
    combined = CombinedOptimizer([torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.LBFGS(parameters[2:])])
    with pytest.raises(ArgumentError, match="LBFGS may compute over whole parameters"):
        torchmn.create_multi_node_optimizer(combined, comm, model=model)


@pytest.mark.guard("plain_optimizer")
@ranks(2)
def test_a_parallel_model_needs_the_multi_node_optimizer(comm):
    model = torchmn.parallelize(network(), comm, mode="datapar")
    parameters = list(model.parameters())
    combined = CombinedOptimizer([torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.Adadelta(parameters[2:])])
    model(torch.rand(2, 4, dtype=torch.float64)).sum().backward()
    with pytest.raises(torchmn.TorchMNError, match=r"CombinedOptimizer.step on a parallel model"):
        combined.step()
