"""Clipping before gradients are averaged raises an error if it changes the numbers, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import torchmn
from tests._worlds import ranks
from torchmn import Communicator
from torchmn.optim import MultiNodeOptimizer, create_multi_node_optimizer

CLIPPING: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": lambda parameters, limit: clip_grad_norm_(parameters, limit),  # imported under another name
    "clip_grad_value_": lambda parameters, limit: nn.utils.clip_grad_value_(parameters, clip_value=limit),
}


def gradients_of_one_to_size(comm: Communicator, **options: Any) -> tuple[nn.Parameter, MultiNodeOptimizer]:
    """A parameter of one element, whose gradient is 1 on the first rank, 2 on the second..."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = create_multi_node_optimizer(torch.optim.SGD([parameter], lr=1.0), comm, **options)
    (parameter.sum() * (comm.rank + 1)).backward()
    return parameter, optimizer


@pytest.mark.guard("LocalClipping")
@ranks(2, 3, on="threads")
@pytest.mark.parametrize("function", CLIPPING)
@pytest.mark.parametrize("double_buffering", [False, True])
def test_clipping_each_ranks_own_gradients_is_an_error_on_all(comm, function: str, double_buffering: bool) -> None:
    parameter, optimizer = gradients_of_one_to_size(comm, double_buffering=double_buffering)
    CLIPPING[function]((p for p in [parameter]), 1.0)  # nothing to clip on rank 0
    with pytest.raises(torchmn.MismatchError, match=rf"{function} was called before .* 0.5 on rank 1.*synchronize\(\)"):
        optimizer.step()
    assert (parameter == 0).all()


@pytest.mark.guard("LocalClipping")
@ranks(2, on="threads")
def test_clipping_on_one_rank_only_is_an_error_on_all(comm) -> None:
    parameter, optimizer = gradients_of_one_to_size(comm)
    if comm.rank == 1:
        clip_grad_norm_(parameter, 0.5)
    with pytest.raises(torchmn.MismatchError, match=r"1 on rank 0, 0.25 on rank 1"):
        optimizer.step()


@pytest.mark.guard("LocalClipping")
@ranks(2, on="threads")
def test_clipping_while_gradients_are_averaged_is_an_error(comm) -> None:
    parameter, optimizer = gradients_of_one_to_size(comm, overlap=True)
    with pytest.raises(torchmn.ArgumentError, match=r"overlap: clip_grad_norm_ .* optimizer.synchronize\(\)"):
        clip_grad_norm_(parameter, 1.0)
    optimizer.synchronize()
    clip_grad_norm_(parameter, 1.0)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((1,), -1.0, dtype=torch.float64), rtol=1e-5, atol=0)


def after_synchronize(parameter: Tensor, optimizer: Any, clip: Callable[..., Any]) -> None:
    optimizer.synchronize()
    clip(parameter, 1.0)


def too_large_nowhere(parameter: Tensor, optimizer: Any, clip: Callable[..., Any]) -> None:
    clip(parameter, 100.0)


def for_the_norm_only(parameter: Tensor, optimizer: Any, clip: Callable[..., Any]) -> None:
    clip(parameter, float("inf"))


def after_a_mean_by_hand(parameter: Tensor, optimizer: Any, clip: Callable[..., Any]) -> None:
    assert parameter.grad is not None
    parameter.grad = optimizer.comm.allreduce(parameter.grad, "mean")
    clip(parameter, 1.0)


def of_gradients_that_are_dropped(parameter: Tensor, optimizer: Any, clip: Callable[..., Any]) -> None:
    clip(parameter, 0.1)
    parameter.grad = None
    (parameter.sum() * (optimizer.comm.rank + 1)).backward()


def of_gradients_that_are_zeroed(parameter: Tensor, optimizer: Any, clip: Callable[..., Any]) -> None:
    assert parameter.grad is not None
    clip(parameter, 0.1)
    parameter.grad.zero_()
    (parameter.sum() * (optimizer.comm.rank + 1)).backward()


def of_other_parameters(parameter: Tensor, optimizer: Any, clip: Callable[..., Any]) -> None:
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.full((1,), 10.0 * (optimizer.comm.rank + 1))
    clip([other], 1.0)


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("function", CLIPPING)
@pytest.mark.parametrize(
    ("case", "limit"),
    [
        (after_synchronize, 1.0),
        (too_large_nowhere, None),
        (for_the_norm_only, None),
        (after_a_mean_by_hand, 1.0),
        (of_gradients_that_are_dropped, None),
        (of_gradients_that_are_zeroed, None),
        (of_other_parameters, None),
    ],
)
def test_clipping_that_leaves_the_numbers_of_one_process_is_not_refused(comm, function: str, case: Any, limit) -> None:
    parameter, optimizer = gradients_of_one_to_size(comm)
    case(parameter, optimizer, CLIPPING[function])
    optimizer.step()
    mean = (comm.size + 1) / 2
    expected = torch.full((1,), -(mean if limit is None else limit), dtype=torch.float64)
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=0)


class Watched(nn.Parameter):
    """A parameter that counts reads of its gradient."""

    looks = 0

    @property
    def grad(self) -> Tensor | None:
        type(self).looks += 1
        return None


@ranks(2, on="threads")
def test_clipping_does_not_read_the_gradients_of_other_optimizers(comm) -> None:
    """Another thread, or another rank of the thread world, may write them at that moment, and torch has no lock."""
    watched = Watched(torch.zeros(1))
    optimizer = create_multi_node_optimizer(torch.optim.SGD([watched], lr=1.0), comm)
    mine = nn.Parameter(torch.ones(1))
    mine.sum().backward()
    comm.barrier()
    before = Watched.looks
    comm.barrier()
    for function in CLIPPING.values():
        function([mine], 0.5)
    comm.barrier()
    after = Watched.looks
    comm.barrier()
    assert after == before
    assert optimizer._collection.gradients()[0].value is None
    assert Watched.looks > before  # as it would, if it had looked
