"""Checkpoints of parallel models hold global tensors: saved in one mode and grid, they load in any other."""

from math import prod

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchmn
from torchmn.errors import ArgumentError

MODES = {
    "halopar": {"height": 2},
    "modelpar": {"height": 3},
    "halodatapar": {"data": 2, "width": 2},
    "datapar": {"data": 2},
}


def make() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(4 * 5 * 5, 9), nn.Tanh(), nn.Linear(9, 3)),
    )


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(3)
    net = make().double()
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3
    batches = [torch.randn(4, 1, 10, 10, generator=generator, dtype=torch.float64) for _ in range(4)]
    return net, batches, torch.tensor([0, 1, 2, 1])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def train(model, optimizer, batches, labels, rows=slice(None)) -> None:
    for x in batches:
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), labels[rows]).backward()
        optimizer.step()


def parallel(comm, net, mode):
    grid = torchmn.ProcessGrid(comm, **MODES[mode])
    model = torchmn.parallelize(net, grid, mode, input_shape=(1, 10, 10))
    each = 4 // grid.sizes["data"]
    rows = slice(grid.place["data"] * each, (grid.place["data"] + 1) * each)
    return model, torchmn.create_multi_node_optimizer(optimizer_of(model), grid, model=model), rows


def size(mode: str) -> int:
    return prod(MODES[mode].values())


@pytest.mark.parametrize(
    ("first", "second"), [("halopar", "modelpar"), ("modelpar", "halodatapar"), ("datapar", "halopar")]
)
def test_training_resumes_in_another_mode_with_the_same_numbers(first, second, problem, tmp_path):
    net, batches, labels = problem
    serial = make().double()
    serial.load_state_dict(net.state_dict())
    steps = optimizer_of(serial)
    train(serial, steps, batches, labels)

    def begin(comm):
        model, optimizer, rows = parallel(comm, net, first)
        train(model, optimizer, batches[:2], labels, rows)
        torchmn.create_multi_node_checkpointer("run", comm, tmp_path).save(2, model=model, optimizer=optimizer)

    def go_on(comm):
        model, optimizer, rows = parallel(comm, make().double(), second)
        checkpointer = torchmn.create_multi_node_checkpointer("run", comm, tmp_path)
        assert checkpointer.maybe_load(model=model, optimizer=optimizer) == 2
        train(model, optimizer, batches[2:], labels, rows)
        return torchmn.full_state_dict(model)

    torchmn.run_threads(begin, size(first))
    for state in torchmn.run_threads(go_on, size(second)):
        torch.testing.assert_close(state, dict(serial.state_dict()), rtol=1e-9, atol=1e-12)


def test_a_plain_model_and_optimizer_load_it_too(problem, tmp_path):
    net, batches, labels = problem
    serial = make().double()
    serial.load_state_dict(net.state_dict())
    train(serial, steps := optimizer_of(serial), batches, labels)

    def begin(comm):
        model, optimizer, rows = parallel(comm, net, "modelpar")
        train(model, optimizer, batches, labels, rows)
        torchmn.create_multi_node_checkpointer("run", comm, tmp_path).save(4, model=model, optimizer=optimizer)

    def load(comm):
        model = make().double()
        optimizer = optimizer_of(model)
        assert torchmn.create_multi_node_checkpointer("run", comm, tmp_path).maybe_load(
            model=model, optimizer=optimizer
        )
        return model.state_dict(), optimizer.state_dict()["state"]

    torchmn.run_threads(begin, 3)
    ((state, kept),) = torchmn.run_threads(load, 1)
    torch.testing.assert_close(dict(state), dict(serial.state_dict()), rtol=1e-9, atol=1e-12)
    for place, values in steps.state_dict()["state"].items():
        torch.testing.assert_close(kept[place]["exp_avg"], values["exp_avg"], rtol=1e-9, atol=1e-12)


def test_an_optimizer_of_slices_without_its_model_is_refused(problem, tmp_path):
    def save(comm):
        _, optimizer, _ = parallel(comm, problem[0], "modelpar")
        with pytest.raises(ArgumentError, match="pass the model too"):
            torchmn.create_multi_node_checkpointer("run", comm, tmp_path).save(0, optimizer=optimizer)

    torchmn.run_threads(save, 3)


def test_an_average_of_the_weights_loads_in_another_mode(problem, tmp_path):
    net, _, _ = problem

    def averaged(comm, mode):
        model = torchmn.parallelize(net, torchmn.ProcessGrid(comm, **MODES[mode]), mode, input_shape=(1, 10, 10))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        average.update_parameters(model)
        return model, average, torchmn.create_multi_node_checkpointer("average", comm, tmp_path)

    def save(comm):
        model, average, checkpointer = averaged(comm, "modelpar")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        average.update_parameters(model)
        checkpointer.save(1, model=model, average=average)

    def load(comm):
        model, average, checkpointer = averaged(comm, "halopar")
        assert checkpointer.maybe_load(model=model, average=average) == 1
        return torchmn.full_state_dict(average)

    torchmn.run_threads(save, 3)
    for state in torchmn.run_threads(load, 2):  # the mean of 1 and 3 times the weights
        for name, parameter in net.named_parameters():
            torch.testing.assert_close(
                state[f"module.{name}"], 2 * parameter, rtol=1e-12, atol=0
            )  # of 1 and 3 times it
