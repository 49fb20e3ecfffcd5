"""The optimizer's part of an experiment's checkpoint."""

import pytest
import torch
from torch import nn

from tests.experiment.running import NamedOptimizer
from torchmn.errors import ExperimentError


def trained(*sizes: int) -> tuple[NamedOptimizer, torch.optim.Optimizer]:
    """An optimizer with momentum, after a step, of a model with layers of these sizes."""
    model = nn.Sequential(*(nn.Linear(size, size) for size in sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    return NamedOptimizer(optimizer, model), optimizer


def test_optimizer_state_contains_parameter_names_and_is_restored():
    (named, optimizer), (other, receiver) = trained(2), trained(2)
    state = named.state_dict()
    assert state["names"] == [["0.weight", "0.bias"]]
    for kept in receiver.state.values():
        kept["momentum_buffer"].zero_()
    other.load_state_dict(state)
    for mine, theirs in zip(receiver.state.values(), optimizer.state.values(), strict=True):
        assert mine["momentum_buffer"].equal(theirs["momentum_buffer"]) and mine["momentum_buffer"].eq(2).all()


def test_loading_the_optimizer_state_of_another_model_raises_an_error():
    (named, _), (other, _) = trained(2, 2), trained(2)
    with pytest.raises(ExperimentError, match="different parameters than the experiment's"):
        other.load_state_dict(named.state_dict())
