"""bcast_data and multi_node_mean_grad: whole models at once."""

import numpy as np
import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import every_world, ranks
from tests._worlds.data import assert_close, assert_refused, assert_same, bits, filled, gradient, numbers, tensor


class Assorted(nn.Module):
    """Parameters and buffers of many dtypes, shapes and layouts."""

    def __init__(self, seed: int):
        super().__init__()
        torch_seed = torch.Generator().manual_seed(seed)
        self.norm = nn.BatchNorm2d(3)
        for buffer in self.norm.buffers():
            buffer.fill_(seed)
        image = torch.randn(4, 3, 5, 5, generator=torch_seed)
        self.channels_last = nn.Parameter(image.to(memory_format=torch.channels_last))
        self.transposed = nn.Parameter(torch.randn(6, 4, generator=torch_seed).t())
        self.scalar = nn.Parameter(torch.randn((), generator=torch_seed))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.sixteen_bits = nn.Parameter(bits((7,), torch.bfloat16, seed))
        self.doubled = nn.Parameter(torch.randn(2, 3, dtype=torch.float64, generator=torch_seed))
        self.frozen = nn.Parameter(bits((5,), torch.int32, seed), requires_grad=False)
        self.large = nn.Parameter(torch.randn(300_001, generator=torch_seed))
        self.large_transposed = nn.Parameter(torch.randn(600, 500, generator=torch_seed).t())
        self.tied = self.doubled
        self.register_buffer("mask", bits((9,), torch.bool, seed))
        self.register_buffer("unsaved", bits((4,), torch.complex64, seed), persistent=False)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


def set_gradients(model: nn.Module, rank: int) -> dict[str, np.ndarray]:
    """Gives every parameter that requires one a gradient that is exact in its dtype; returns them."""
    values = {}
    for place, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.requires_grad:
            values[name] = np.round(numbers(tuple(parameter.shape), rank, place) * 4) * 12
            parameter.grad = tensor(values[name], parameter.dtype)
            if parameter.dim() == 4:
                parameter.grad = parameter.grad.to(memory_format=torch.channels_last)
    return values


@every_world
@ranks(2, on="openmpi")
def test_bcast_data_gives_every_rank_the_parameters_and_buffers_of_rank_0(comm):
    model, expected = Assorted(seed=comm.rank), Assorted(seed=0).tensors()
    before = {name: (x.data_ptr(), x.stride(), x.requires_grad) for name, x in model.tensors().items()}
    comm.bcast_data(model)
    for name, x in model.tensors().items():
        assert_same(x.detach(), expected[name].detach(), name)
        assert (x.data_ptr(), x.stride(), x.requires_grad) == before[name], f"{name} is another tensor now"
    assert model.tied is model.doubled
    comm.bcast_data(nn.ReLU())


@ranks(2, on=("threads", "mpi"))
def test_backward_notices_that_bcast_data_has_changed_a_large_parameter(comm):
    model = nn.ParameterList([nn.Parameter(torch.full((300_000,), float(comm.rank)))])
    squares = model[0] ** 2
    comm.bcast_data(model)
    if comm.rank == 0:
        squares.sum().backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()


@ranks(2, 3)
def test_bcast_data_refuses_models_that_differ(comm):
    last = comm.rank == comm.size - 1
    pairs = {
        "weight": (nn.Linear(3, 2), nn.Linear(4, 2)),
        "bias": (nn.Linear(3, 2), nn.Linear(3, 2, bias=False)),
        "float64": (nn.Linear(3, 2), nn.Linear(3, 2).double()),
        "running_mean": (nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)),
    }
    for word, (usual, other) in pairs.items():
        model = other if last else usual
        before = [x.clone() for x in model.parameters()]
        assert_refused(comm, lambda model=model: comm.bcast_data(model), "bcast_data", word, kind=torchmn.MismatchError)
        for x, y in zip(model.parameters(), before, strict=True):
            assert_same(x.detach(), y.detach(), "nothing changed")


@every_world
@ranks(2, on="openmpi")
def test_gradients_become_their_mean_over_ranks(comm):
    model = Assorted(seed=0)
    everyone = [set_gradients(model, rank) for rank in range(comm.size)]
    set_gradients(model, comm.rank)
    layout = gradient(model.channels_last).stride()
    comm.multi_node_mean_grad(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mean = np.mean([values[name] for values in everyone], axis=0)
            relative = {torch.float64: 1e-12, torch.bfloat16: 1e-2}.get(parameter.dtype, 1e-6)
            assert_close(parameter.grad, mean, relative)
            assert gradient(parameter).dtype == parameter.dtype
        else:
            assert parameter.grad is None
    assert gradient(model.channels_last).stride() == layout


@every_world
def test_a_gradient_that_no_rank_has_stays_none_or_becomes_zeros(comm):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(3, 1)])
    model[0].weight.grad = torch.full((2, 2), float(comm.rank))
    comm.multi_node_mean_grad(model)
    assert_close(model[0].weight.grad, np.full((2, 2), (comm.size - 1) / 2))
    assert model[0].bias.grad is None and model[1].weight.grad is None
    comm.multi_node_mean_grad(model, zero_fill=True)
    assert_close(model[0].weight.grad, np.full((2, 2), (comm.size - 1) / 2), 1e-6)
    assert_close(model[1].weight.grad, np.zeros((1, 3)))
    comm.multi_node_mean_grad(nn.Linear(2, 2))
    comm.multi_node_mean_grad(nn.ReLU(), zero_fill=True)


@ranks(2, 3, 4)
def test_zero_fill_counts_a_gradient_that_is_missing_as_zeros(comm):
    model = nn.Linear(3, 2)
    model.bias.grad = torch.ones(2)
    if comm.rank == 0:
        model.weight.grad = torch.full((2, 3), 6.0)
    comm.multi_node_mean_grad(model, zero_fill=True)
    assert_close(model.weight.grad, np.full((2, 3), 6.0 / comm.size), 1e-6)
    assert_close(model.bias.grad, np.ones(2), 1e-6)


@ranks(2, 3, 4)
@ranks(2, on="openmpi")
def test_ranks_that_disagree_about_gradients_get_an_error_that_names_them(comm):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].weight.grad = torch.full((2, 3), float(comm.rank))
    if comm.rank == comm.size - 1:
        model[1].bias.grad = torch.ones(1)
    words = ("multi_node_mean_grad", "'1.bias'", f"rank {comm.size - 1}", "zero_fill")
    assert_refused(comm, lambda: comm.multi_node_mean_grad(model), *words, kind=torchmn.MismatchError)
    assert_close(model[0].weight.grad, np.full((2, 3), float(comm.rank)))
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    assert_refused(comm, lambda: comm.multi_node_mean_grad(sparse), "sparse", "weight")


@every_world
def test_gradients_of_whole_batches_and_of_their_parts_are_equal(comm):
    model = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(), 0)
    batch = tensor(numbers((3 * comm.size, 4), 1))
    model(batch).pow(2).mean().backward()
    expected = [gradient(parameter).clone().numpy() for parameter in model.parameters()]
    model.zero_grad()
    model(batch[comm.rank :: comm.size]).pow(2).mean().backward()
    comm.multi_node_mean_grad(model)
    for parameter, whole in zip(model.parameters(), expected, strict=True):
        assert_close(parameter.grad, whole, 1e-10)
