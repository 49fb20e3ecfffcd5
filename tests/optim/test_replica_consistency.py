"""Values that must be equal on all ranks: if a rank changes them, the next step raises on all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests.optim.problem import assert_close, batch, loss_of, make_model
from torchmn import Communicator
from torchmn.optim import MultiNodeOptimizer, create_multi_node_optimizer

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "overlap": {"overlap": True}, "double": {"double_buffering": True}}


def trained(comm: Any, **options: Any) -> tuple[nn.Sequential, MultiNodeOptimizer]:
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = create_multi_node_optimizer(adam, comm, model=model, **options)
    for step in range(2):
        train(comm, model, optimizer, step)
    optimizer.flush()
    return model, optimizer


def train(comm: Communicator, model: nn.Module, optimizer: MultiNodeOptimizer, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    loss_of(model, x[comm.rank :: comm.size], y[comm.rank :: comm.size]).backward()
    optimizer.step()


def load_model(model: Any, optimizer: Any) -> None:
    model.load_state_dict(make_model(seed=1).state_dict())


def load_layer(model: Any, optimizer: Any) -> None:
    model[2].load_state_dict(make_model(seed=1)[2].state_dict())


def replace_data(model: Any, optimizer: Any) -> None:
    model[2].bias.data = model[2].bias.data + 1e-12


def load_optimizer(model: Any, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][3]["exp_avg"] *= 2
    optimizer.load_state_dict(state)


@pytest.mark.guard("ReplicaConsistency")
@ranks(2, 3, on="threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (load_model, "0.weight, 0.bias, 2.weight, 2.bias"),
        (load_layer, "2.weight, 2.bias"),
        (replace_data, "2.bias"),
        (load_optimizer, "state of 2.bias"),
    ],
)
def test_what_is_loaded_on_one_rank_only_is_an_error_on_all(
    comm, kind: str, change: Callable[..., None], named: str
) -> None:
    model, optimizer = trained(comm, **KINDS[kind])
    if comm.rank == 0:
        change(model, optimizer)
    with pytest.raises(torchmn.MismatchError, match=rf"only some ranks have modified .* differ now: {named}\."):
        train(comm, model, optimizer, 2)


def loaded_by_all(comm: Communicator, model: Any, optimizer: Any) -> None:
    load_model(model, optimizer)
    load_optimizer(model, optimizer)


def loaded_by_one_and_sent_to_all(comm: Communicator, model: Any, optimizer: Any) -> None:
    if comm.rank == 0:
        load_model(model, optimizer)
    comm.bcast_data(model)
    load_optimizer(model, optimizer)


def sent_by_one_and_loaded_by_the_others(comm: Communicator, model: Any, optimizer: Any) -> None:
    if comm.rank == 0:
        loaded_by_all(comm, model, optimizer)
    states = comm.bcast_obj((model.state_dict(), optimizer.state_dict()))
    if comm.rank != 0:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])


def evaluated_with_other_values_by_one(comm: Communicator, model: Any, optimizer: Any) -> None:
    loaded_by_all(comm, model, optimizer)
    if comm.rank == 0:
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(make_model(seed=2).state_dict())
        model.load_state_dict(own)


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("kind", ["plain", "overlap"])
@pytest.mark.parametrize(
    "way",
    [
        loaded_by_all,
        loaded_by_one_and_sent_to_all,
        sent_by_one_and_loaded_by_the_others,
        evaluated_with_other_values_by_one,
    ],
)
def test_equal_values_are_accepted_however_they_were_set(comm, kind: str, way: Callable[..., None]) -> None:
    model, optimizer = trained(comm, **KINDS[kind])
    way(comm, model, optimizer)
    expected, alone = trained(comm.split(comm.rank))
    expected.load_state_dict(make_model(seed=1).state_dict())
    load_optimizer(expected, alone)
    for step in (2, 3):
        x, y = batch(step)
        alone.zero_grad()
        loss_of(expected, x, y).backward()
        alone.step()
        train(comm, model, optimizer, step)
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in expected.parameters()])


@pytest.mark.guard("Hyperparameters")
@ranks(2, on="threads")
@pytest.mark.parametrize("kind", ["plain", "overlap"])
def test_momentum_and_rates_in_tensors_are_compared_at_every_step(comm, kind: str) -> None:
    for name, value in {"betas": (0.5, 0.9), "weight_decay": 0.1, "lr": 0.5}.items():
        model, optimizer = trained(comm, **KINDS[kind])
        if comm.rank == 1:
            optimizer.param_groups[0][name] = value
        with pytest.raises(torchmn.MismatchError, match=name):
            train(comm, model, optimizer, 2)
    rate = torch.tensor(0.01 * (1 + comm.rank))
    with pytest.raises(torchmn.MismatchError, match=r"lr 0\.0[12]"):
        create_multi_node_optimizer(torch.optim.Adam(make_model().parameters(), lr=rate), comm)


@ranks(2, on="threads")
def test_a_schedule_of_one_rank_that_changes_nothing_is_no_difference(comm) -> None:
    model, optimizer = trained(comm)
    if comm.rank == 0:
        torch.optim.lr_scheduler.StepLR(optimizer, 1000)  # leaves initial_lr in the groups
    before = model[0].weight.detach().clone()
    train(comm, model, optimizer, 2)
    assert not torch.equal(before, model[0].weight)
