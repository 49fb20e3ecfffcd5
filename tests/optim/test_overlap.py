"""Gradients that are averaged during backward give the same numbers as after it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests._worlds import ranks
from tests.optim.problem import OPTIMIZERS, STEPS, assert_close, batch, loss_of, make_model, serial_run, uneven
from torchmn.optim import MultiNodeOptimizer, create_multi_node_optimizer
from torchmn.optim.reducers import OverlappedReducer


class SmallBuckets(OverlappedReducer):
    """Several buckets for a small model."""

    bucket_bytes = 1


def Overlapping(*args, **kwargs) -> MultiNodeOptimizer:  # noqa: N802  (makes one)
    return MultiNodeOptimizer(*args, **kwargs, reducer=SmallBuckets)


def local(comm, step: int = 0) -> list[Tensor]:
    return [part.chunk(comm.size)[comm.rank] for part in batch(step)]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


@ranks(1, 2, 3, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_training_equals_one_process(comm) -> None:
    _, parameters = serial_run("adam")
    model = make_model(seed=comm.rank)
    optimizer = Overlapping(OPTIMIZERS["adam"](model.parameters()), comm, model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *local(comm, step)).backward()
        optimizer.step()
    assert len(optimizer._reducer._buckets) == 4
    assert_close(values(model), parameters)


@ranks(2, on=("threads", "mpi"))
def test_weighed_losses_accumulation_and_clipping_equal_one_process(comm) -> None:
    serial, model = make_model(), make_model()
    inner = OPTIMIZERS["sgd"](serial.parameters())
    optimizer = Overlapping(OPTIMIZERS["sgd"](model.parameters()), comm)
    for step in range(STEPS):
        x, y = batch(step)
        inner.zero_grad()
        (loss_of(serial, x[:6], y[:6]) + loss_of(serial, x[6:], y[6:])).backward()
        expected = nn.utils.clip_grad_norm_(serial.parameters(), 0.1)
        inner.step()
        mine = uneven(comm, 6)
        optimizer.zero_grad()
        with optimizer.no_sync():
            optimizer.weigh(loss_of(model, x[:6][mine], y[:6][mine]), len(x[:6][mine])).backward()
        optimizer.weigh(loss_of(model, x[6:][mine], y[6:][mine]), len(x[6:][mine])).backward()
        optimizer.synchronize()
        torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 0.1), expected)
        optimizer.step()
    assert_close(values(model), values(serial))


class Branches(nn.Module):
    """Another layer on each rank, one that no rank uses, and sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4, sparse=True, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(4, 3, dtype=torch.float64) for _ in range(4))
        for place, parameter in enumerate(self.parameters()):
            parameter.data = torch.linspace(-1, 1 + place, parameter.numel(), dtype=torch.float64).view_as(parameter)

    def forward(self, words: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.words(words)).sin().sum()


@ranks(2, 3, on="threads")
@ranks(2, on="gloo")
def test_gradients_that_ranks_lack_and_sparse_ones(comm) -> None:
    plain, model = Branches(), Branches()
    optimizers = [
        create_multi_node_optimizer(torch.optim.SGD(plain.parameters(), lr=0.1), comm),
        Overlapping(torch.optim.SGD(model.parameters(), lr=0.1), comm),
    ]
    for step in range(3):
        for optimizer, net in zip(optimizers, (plain, model), strict=True):
            optimizer.zero_grad()
            net(torch.tensor([comm.rank, 5, step]), (comm.rank + step) % 3).backward()
            optimizer.step()
    assert_close(values(model), values(plain))
    assert model.branches[3].weight.grad is None
    model = Branches()
    strict = Overlapping(torch.optim.SGD(model.parameters(), lr=0.1), comm, model, zero_fill=False)
    model(torch.tensor([0]), comm.rank).backward()
    with pytest.raises(torchmn.MismatchError, match=r"branches\.\d\.bias: no gradient on rank"):
        strict.step()


@ranks(2, on="threads")
def test_gradients_without_a_step_are_dropped(comm) -> None:
    serial, model = make_model(), make_model()
    inner = torch.optim.SGD(serial.parameters(), lr=0.1)
    optimizer = Overlapping(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    for step in range(4):
        loss_of(model, *local(comm, step)).backward()  # as of a discriminator, in the generator's step
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, *local(comm, step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        inner.zero_grad()
        loss_of(serial, *batch(step + 1)).backward()
        inner.step()
    assert_close(values(model), values(serial))


@ranks(2, on="threads")
def test_parameters_that_appear_later_become_rank_0s_and_are_averaged(comm) -> None:
    serial, model = make_model(), make_model()
    extra, serial_extra = (nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    for net in (serial, model):
        net[2].weight.requires_grad_(False)
    inner = torch.optim.SGD(serial.parameters(), lr=0.1)
    optimizer = Overlapping(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    for step in range(6):
        if step == 2:
            for net in (serial, model):
                net[2].weight.requires_grad_(True)
                net[0].bias.requires_grad_(False)
        if step == 4:
            optimizer.add_param_group({"params": [extra]})
            inner.add_param_group({"params": [serial_extra]})
        optimizer.zero_grad()
        inner.zero_grad()
        x, y = batch(step)
        mine, wanted = local(comm, step)
        (loss_of(model, mine, wanted) + (extra * mine[:, :2]).sin().mean()).backward()
        (loss_of(serial, x, y) + (serial_extra * x[:, :2]).sin().mean()).backward()
        optimizer.step()
        inner.step()
    assert_close([*values(model), extra.detach()], [*values(serial), serial_extra.detach()])
    model[0].bias.data += comm.rank
    model[0].bias.requires_grad_(True)
    optimizer.zero_grad()
    loss_of(model, *local(comm)).backward()
    optimizer.step()
    assert torch.equal(*comm.allgather(model[0].bias.detach()))


@ranks(2, on="threads")
def test_what_does_not_support_overlap_raises(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, overlap=True)
    assert isinstance(optimizer._reducer, OverlappedReducer)
    loss_of(model, *local(comm)).backward()
    with pytest.raises(torchmn.ArgumentError, match=r"second backward before step.*no_sync"):
        loss_of(model, *local(comm)).backward()
    with pytest.raises(torchmn.ArgumentError, match=r"optimizer\.weigh"):
        optimizer.step(weight=3)
    optimizer.step()
    with pytest.raises(torchmn.ArgumentError, match="double_buffering or overlap, got both"):
        create_multi_node_optimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), comm, overlap=True, double_buffering=True
        )


@ranks(2, on="threads")
def test_a_deleted_optimizer_sends_nothing(comm) -> None:
    _, parameters = serial_run("adam", steps=2)
    model = make_model()
    optimizer = Overlapping(OPTIMIZERS["adam"](model.parameters()), comm, model)
    optimizer = create_multi_node_optimizer(OPTIMIZERS["adam"](model.parameters()), comm)
    gc.collect()
    for step in range(2):
        optimizer.zero_grad()
        x, y = local(comm, step)
        for half in (slice(0, 3), slice(3, 6)):  # the one with overlap would refuse a second backward
            (loss_of(model, x[half], y[half]) / 2).backward()
        optimizer.step()
    assert_close(values(model), parameters)


@ranks(2, on="threads")
def test_a_rank_that_drops_what_another_steps_with_is_an_error_on_both(comm) -> None:
    model = make_model()
    optimizer = Overlapping(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    loss_of(model, *local(comm)).backward()
    with pytest.raises(torchmn.MismatchError, match=r"zero_grad after a backward without a step"):
        optimizer.step() if comm.rank else optimizer.zero_grad()
