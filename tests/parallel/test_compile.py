"""torch.compile of a parallel model works; a compiled submodule raises an error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchmn
from tests.parallel.training import tile_of
from tests.sharded.parity import numbers
from torchmn.errors import ArgumentError, ParallelizeError
from torchmn.parallel import full_state_dict, parallelize

SHAPE = (2, 8, 6)


def small_net():
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, 3)),
    ).double()


NET = small_net()


def train(model, optimizer, x, step):
    for _ in range(2):
        optimizer.zero_grad()
        step(model, x).backward()
        optimizer.step()


def loss_of(model, x):
    return F.cross_entropy(model(x), torch.arange(len(x)) % 3)


def whole_step(model, x):
    """What people compile: forward and backward."""
    loss = loss_of(model, x)
    loss.backward()
    return loss.detach().requires_grad_()


@pytest.mark.parametrize("compiled", ["model", "step"])
@pytest.mark.parametrize("mode", ["halopar", "modelpar"])
def test_compiling_a_parallel_model_or_a_step_with_it_gives_the_numbers_of_one_rank(mode, compiled):
    x = numbers((4, *SHAPE))
    serial = parallelize(NET, torchmn.create_communicator("solo"), mode, input_shape=SHAPE)
    serial_optimizer = torchmn.create_multi_node_optimizer(
        torch.optim.SGD(serial.parameters(), lr=0.1), serial.parallelism.grid, model=serial
    )
    train(serial, serial_optimizer, x, loss_of)

    def body(comm):
        grid = torchmn.ProcessGrid(comm, height=2)
        model = parallelize(NET, grid, mode, input_shape=SHAPE)
        optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), grid, model=model)
        called, step = model, loss_of
        if compiled == "model":
            called = torch.compile(model, backend="aot_eager")
        else:
            step = torch.compile(whole_step, backend="aot_eager")
        train(called, optimizer, tile_of(x, grid) if mode == "halopar" else x, step)
        return full_state_dict(model)

    for state in torchmn.run_threads(body, 2):
        torch.testing.assert_close(state, serial.state_dict(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", ["datapar", "modelpar", "halopar"])
def test_a_compiled_model_is_refused_with_the_order_that_works(mode):
    compiled = torch.compile(NET, backend="eager")

    def body(comm):
        with pytest.raises(ArgumentError, match=r"the model is compiled .*torch\.compile\(parallelize"):
            parallelize(compiled, comm, mode)

    torchmn.run_threads(body, 2)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_layer_that_is_compiled_after_parallelize_is_refused_by_name(in_place):
    def body(comm):
        grid = torchmn.ProcessGrid(comm, height=2)
        model = parallelize(NET, grid, "halopar", input_shape=SHAPE)
        if in_place:
            model[0].compile(backend="eager")
        else:
            model[0] = torch.compile(model[0], backend="eager")
        with pytest.raises(ParallelizeError, match=r"^0 was compiled"):
            model(tile_of(numbers((4, *SHAPE)), grid))

    torchmn.run_threads(body, 2)
