"""The update is torch's fused one where that is the same, and the plain one where it would be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import torchmn
from torchmn.optim.fused import update
from torchmn.parallel import GUARDS

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda ps, **options: SGD(ps, lr=0.1, **options),
    "momentum": lambda ps, **options: SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **options),
    "adam": lambda ps, **options: Adam(ps, lr=0.1, **options),
    "adamw": lambda ps, **options: AdamW(ps, lr=0.1, amsgrad=True, **options),
}


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the fused updates that ran."""
    calls: list[str] = []
    for module, name in (("sgd", "_fused_sgd"), ("adam", "_fused_adam"), ("adamw", "_fused_adamw")):
        home = sys.modules[f"torch.optim.{module}"]
        original = getattr(home, name, None)
        if original is None:
            continue  # AdamW calls Adam's, in releases after torch 2.6

        def spy(*args: Any, name: str = name, original: Callable = original, **kwargs: Any) -> None:
            calls.append(name)
            original(*args, **kwargs)

        monkeypatch.setattr(home, name, spy)
    return calls


def trained(make: Callable[[list[nn.Parameter]], Optimizer], step: Callable[[Optimizer], Any], like: Tensor) -> Tensor:
    """A parameter in the order of `like` after four steps with gradients in alternating orders."""
    parameter = nn.Parameter(torch.arange(like.numel(), dtype=like.dtype).reshape(like.shape) / 10)
    with torch.no_grad():
        parameter.set_(parameter.detach().clone().as_strided(like.shape, like.stride()).copy_(parameter))
    optimizer = make([parameter])
    for turn in range(4):
        gradient = torch.arange(like.numel(), dtype=like.dtype).reshape(like.shape).sin() * (turn + 1)
        order = torch.channels_last if turn % 2 and like.dim() == 4 else torch.contiguous_format
        parameter.grad = gradient.contiguous(memory_format=order)
        step(optimizer)
        assert optimizer.param_groups[0]["fused"] is None
    return parameter.detach()


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_those_of_the_plain_update_in_every_order_of_memory(name: str, order: torch.memory_format) -> None:
    like = torch.zeros(2, 3, 4, 4, dtype=torch.float64).contiguous(memory_format=order)
    plain = trained(OPTIMIZERS[name], lambda optimizer: optimizer.step(), like)
    torch.testing.assert_close(trained(OPTIMIZERS[name], update, like), plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_ordinary_parameter_is_updated_by_the_fused_kernel(name: str, fused_calls: list[str]) -> None:
    trained(OPTIMIZERS[name], update, torch.zeros(5, 7))
    assert len(fused_calls) == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: Adam(ps, fused=False),
        lambda ps: Adam(ps, foreach=True),
        lambda ps: Adam(ps, lr=torch.tensor(0.1)),
        lambda ps: type("Mine", (Adam,), {})(ps),
    ],
)
def test_what_the_user_chose_stays(make: Callable[[list[nn.Parameter]], Optimizer], fused_calls: list[str]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    before = dict(optimizer.param_groups[0])
    parameter.grad = torch.ones(3)
    update(optimizer)
    assert fused_calls == []
    assert {key: value for key, value in optimizer.param_groups[0].items() if key != "params"} == {
        key: value for key, value in before.items() if key != "params"
    }


def test_short_dtypes_and_users_hooks_use_the_plain_update(fused_calls: list[str]) -> None:
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    update(SGD([half], lr=0.1))
    image = nn.Parameter(torch.zeros(2, 3, 4, 4))
    image.grad = torch.arange(96.0).view(2, 3, 4, 4)

    def reorder(optimizer: Optimizer, *_: object) -> None:
        image.grad = image.grad.contiguous(memory_format=torch.channels_last)

    optimizer = SGD([image], lr=1.0)
    optimizer.register_step_pre_hook(reorder)
    update(optimizer)
    assert fused_calls == []
    assert torch.equal(image.detach(), -torch.arange(96.0).view(2, 3, 4, 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_learns_later_than_others_of_its_group(name: str) -> None:
    results = []
    for step in (update, lambda optimizer: optimizer.step()):
        parameters = [nn.Parameter(torch.full((3,), value, dtype=torch.float64)) for value in (1.0, 2.0)]
        optimizer = OPTIMIZERS[name](parameters)
        for turn in range(4):
            parameters[0].grad = torch.full((3,), 1.0 + turn, dtype=torch.float64)
            parameters[1].grad = torch.full((3,), 2.0 - turn, dtype=torch.float64) if turn else None
            step(optimizer)
        results.append(torch.stack([p.detach() for p in parameters]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-14)


def test_parallel_models_update_this_way(fused_calls: list[str]) -> None:
    comm = torchmn.create_communicator("solo")
    model = torchmn.parallelize(nn.Sequential(nn.Conv2d(1, 2, 3)), torchmn.ProcessGrid(comm), "halopar")
    GUARDS.load()  # they see every optimizer's step from now on
    optimizer = torchmn.create_multi_node_optimizer(Adam(model.parameters()), comm, model=model)
    model(torch.ones(1, 1, 4, 4)).sum().backward()
    optimizer.step()
    assert fused_calls == ["_fused_adam"]


def test_multi_node_optimizers_update_this_way(fused_calls: list[str]) -> None:
    model = nn.Linear(3, 2)
    comm = torchmn.create_communicator("solo")
    optimizer = torchmn.create_multi_node_optimizer(Adam(model.parameters()), comm, model=model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert fused_calls == ["_fused_adam"]
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torchmn.create_multi_node_optimizer(SGD(embedding.parameters(), lr=0.1), comm)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert fused_calls == ["_fused_adam"]


@pytest.mark.parametrize("chosen", [None, True], ids=["chosen by us", "chosen by the user"])
@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_tensor_that_a_fused_step_writes_has_a_new_version(
    name: str, with_closure: bool, chosen: bool | None
) -> None:
    learns, rests = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = OPTIMIZERS[name]([learns, rests], fused=chosen)
    closure = (lambda: torch.zeros(())) if with_closure else None
    for _ in range(2):
        learns.grad = torch.ones(5)
        written = [learns, *(x for x in optimizer.state[learns].values() if isinstance(x, torch.Tensor))]
        before = [(x, x._version, x.clone()) for x in written]
        resting = rests._version
        update(optimizer, closure)
        assert all(x._version > version for x, version, values in before if not torch.equal(x, values))
        assert not torch.equal(learns, before[0][2])
        assert rests._version == resting
