"""grad_dtype: gradients are sent in 16 bits and summed in float32, with no further rounding."""

import numpy as np
import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_close, assert_same, bits, gradient, numbers, tensor

HALVES = (torch.bfloat16, torch.float16)


def model_with(values: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> nn.ParameterDict:
    """A model whose parameters have these gradients."""
    model = nn.ParameterDict()
    for name, value in values.items():
        model[name] = nn.Parameter(torch.zeros(np.shape(value), dtype=dtype))
        model[name].grad = tensor(value, dtype)
    return model


def check_compression(comm, half: torch.dtype) -> None:
    """Checks one communicator, made with `grad_dtype=half`, of more than one rank."""
    shapes = {"large": (300_000,), "matrix": (5, 7), "scalar": (), "empty": (0,)}
    everyone = [
        {name: numbers(shape, rank, place) for place, (name, shape) in enumerate(shapes.items())}
        for rank in range(comm.size)
    ]
    model = model_with(everyone[comm.rank])
    comm.multi_node_mean_grad(model)
    for name, parameter in model.items():
        on_the_wire = torch.stack([tensor(values[name], torch.float32).to(half) for values in everyone])
        mean = on_the_wire.to(torch.float32).mean(0).to(half).to(torch.float32)
        # The order of the sum is free: the mean may fall on the other side of a rounding boundary.
        assert_close(gradient(parameter), mean.numpy(), float(torch.finfo(half).eps))
        assert torch.equal(gradient(parameter), gradient(parameter).to(half).to(torch.float32)), "not compressed"
        assert_same(gradient(parameter), comm.bcast(gradient(parameter)), f"{name} is the same on every rank")

    # Summed in 16 bits these would be infinite, or lose every one but the first.
    large = model_with({"w": np.full(3, 60_000.0)})
    comm.multi_node_mean_grad(large)
    assert_close(gradient(large["w"]), np.full(3, float(torch.tensor(60_000.0, dtype=half))))
    lost = model_with({"w": np.full(2, 2048.0 if comm.rank == 0 else 1.0)})
    comm.multi_node_mean_grad(lost)
    exact = torch.tensor((2048.0 + comm.size - 1) / comm.size, dtype=half)
    assert_close(gradient(lost["w"]), np.full(2, float(exact)))

    # What does not shrink is not rounded.
    whole = model_with({"w": np.full(2, float(comm.rank))}, half)
    comm.multi_node_mean_grad(whole)
    assert_close(gradient(whole["w"]), np.full(2, (comm.size - 1) / 2))
    # allreduce and bcast_data are the user's own numbers: not compressed.
    x = tensor(numbers((5,), 1), torch.float32)
    assert_close(comm.allreduce(x, "mean"), x.numpy(), 1e-6)
    linear = nn.Linear(3, 3)
    linear.weight.data.copy_(tensor(numbers((3, 3), comm.rank), torch.float32))
    comm.bcast_data(linear)
    assert_same(linear.weight.detach(), tensor(numbers((3, 3), 0), torch.float32))


@ranks(2, 3, 4, on="mpi")
@ranks(2, on="openmpi")
@ranks(2, 3, on="gloo")
def test_gradients_are_compressed_between_processes(comm):
    for half in HALVES:
        with torchmn.create_communicator(grad_dtype=half) as compressing:
            assert type(compressing) is type(comm)
            check_compression(compressing, half)
            part = compressing.split(0, -compressing.rank)
            check_compression(part, half)
            assert part is not None
            part.finalize()
    assert comm.allreduce(torch.ones(1)).item() == comm.size


@pytest.mark.parametrize("size", [2, 3, 6])
def test_gradients_are_compressed_between_threads(size):
    for half in HALVES:
        torchmn.run_threads(lambda comm, half=half: check_compression(comm, half), size, grad_dtype=half)


@ranks(2, 3)
def test_ranks_that_would_send_other_dtypes_get_an_error_before(comm):
    comm.settings.grad_dtype = torch.bfloat16 if comm.rank == 0 else None
    with pytest.raises(torchmn.TorchMNError, match="grad_dtype"):
        comm.multi_node_mean_grad(model_with({"w": np.ones(3)}))


def test_one_rank_alone_rounds_nothing():
    comm = torchmn.create_communicator("solo", grad_dtype=torch.bfloat16)
    model = model_with({"w": np.array([1 + 2.0**-20])})
    comm.multi_node_mean_grad(model)
    assert_close(gradient(model["w"]), np.array([1 + 2.0**-20]))


def test_a_dtype_that_is_no_float_is_refused():
    for wrong in (torch.int32, "bfloat16", 16, bits((1,), torch.float16, 0)):
        with pytest.raises(torchmn.ArgumentError, match="grad_dtype"):
            torchmn.create_communicator("solo", grad_dtype=wrong)
