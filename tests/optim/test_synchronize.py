"""Changes between `synchronize` and `step`: no rank steps with gradients that are not averaged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from torchmn import Communicator
from torchmn.optim import MultiNodeOptimizer, create_multi_node_optimizer


def two_parameters(comm: Communicator) -> tuple[nn.Parameter, nn.Parameter, MultiNodeOptimizer]:
    """`a` has a mean gradient after `synchronize`; `b` is new to an optimizer whose learning rate is 1."""
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = create_multi_node_optimizer(torch.optim.SGD([a], lr=1.0), comm)
    (a.sum() * comm.rank).backward()
    optimizer.synchronize()
    return a, b, optimizer


@ranks(2, 3, on="threads")
def test_a_group_that_is_added_after_synchronize_is_averaged(comm) -> None:
    a, b, optimizer = two_parameters(comm)
    (b.sum() * comm.rank).backward()
    optimizer.add_param_group({"params": [b]})
    optimizer.step()
    middle = (comm.size - 1) / 2
    assert (a == -middle).all() and (b == -middle).all()


@ranks(2, 3, on="threads")
def test_a_parameter_that_is_unfrozen_after_synchronize_is_averaged(comm) -> None:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = create_multi_node_optimizer(torch.optim.SGD([a, b], lr=1.0), comm)
    (a.sum() * comm.rank).backward()
    optimizer.synchronize()
    b.requires_grad_()
    (b.sum() * comm.rank).backward()
    optimizer.step()
    middle = (comm.size - 1) / 2
    assert (a == -middle).all() and (b == -middle).all()


@ranks(2, 3, on="threads")
def test_a_gradient_that_is_replaced_after_synchronize_is_averaged(comm) -> None:
    a, _, optimizer = two_parameters(comm)
    a.grad = torch.full((2,), 10.0 * comm.rank)
    optimizer.step()
    assert (a == -10 * (comm.size - 1) / 2).all()


@ranks(2, on="threads")
def test_a_rank_that_drops_its_mean_and_runs_no_backward_counts_as_zero(comm) -> None:
    a, _, optimizer = two_parameters(comm)
    a.grad = None  # as model.zero_grad() does: this step is left out
    if comm.rank == 0:
        a.sum().backward()
    optimizer.step()
    assert (a == -0.5).all()


@ranks(2, on="threads")
def test_a_scaler_steps_only_with_gradients_that_were_averaged(comm) -> None:
    _, b, optimizer = two_parameters(comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    (scaler.scale(b.sum()) * comm.rank).backward()
    optimizer.add_param_group({"params": [b]})
    with pytest.raises(torchmn.ArgumentError, match=r"call optimizer.synchronize\(\)"):
        scaler.step(optimizer)
