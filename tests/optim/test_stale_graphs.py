"""A backward through a graph that is older than a step: an error, as torch makes it one, and no wrong gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests._worlds import ranks
from tests.optim.problem import make_model
from torchmn.optim import create_multi_node_optimizer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda ps, **options: SGD(ps, lr=0.05, momentum=0.9, **options),
    "adam": lambda ps, **options: Adam(ps, lr=0.05, **options),
    "adamw": lambda ps, **options: AdamW(ps, lr=0.05, amsgrad=True, **options),
}
STALE = "modified by an inplace operation"


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["plain", "overlap"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(1, 2)
def test_chainers_order_of_an_adversarial_update_raises(comm: Any, name: str, options: dict[str, bool]) -> None:
    generator, critic = make_model(), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    steps_generator = create_multi_node_optimizer(OPTIMIZERS[name](generator.parameters()), comm, **options)
    steps_critic = create_multi_node_optimizer(OPTIMIZERS[name](critic.parameters()), comm, **options)
    noise = torch.linspace(-1, 1, 30, dtype=torch.float64).view(6, 5) + comm.rank

    judged = critic(generator(noise))
    steps_critic.zero_grad()
    F.softplus(judged).mean().backward(retain_graph=True, inputs=list(critic.parameters()))
    steps_critic.step()
    steps_generator.zero_grad()
    with pytest.raises(RuntimeError, match=STALE):
        F.softplus(-judged).mean().backward()
