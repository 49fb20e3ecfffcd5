"""Multi-node batch normalisation: the numbers of torch's BatchNorm on the concatenated batch."""

import pickle
from copy import deepcopy
from inspect import signature

import pytest
import torch
from torch import Tensor, nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused, gradient, numbers, tensor
from torchmn.nn import MultiNodeBatchNorm1d, MultiNodeBatchNorm2d, MultiNodeBatchNorm3d

# (ours, torch's, shape behind (batch, channel)).
LAYERS = [
    (MultiNodeBatchNorm1d, nn.BatchNorm1d, ()),
    (MultiNodeBatchNorm1d, nn.BatchNorm1d, (5,)),
    (MultiNodeBatchNorm2d, nn.BatchNorm2d, (3, 2)),
    (MultiNodeBatchNorm3d, nn.BatchNorm3d, (2, 1, 3)),
]
CHANNELS = 3


def local_sizes(size: int) -> list[int]:
    """Uneven, and the second rank has nothing."""
    return [4] if size == 1 else [5, 0, 2, 3, 1, 4][:size]


def parts_of(comm, shape: tuple[int, ...], *seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Every rank's local batch, with different means and spreads of channels on each rank."""
    parts = []
    for rank, n in enumerate(local_sizes(comm.size)):
        values = tensor(numbers((n, CHANNELS, *shape), rank, *seed))
        steps = torch.arange(CHANNELS, dtype=torch.float64).view(1, -1, *[1] * len(shape))
        parts.append((values * (1 + rank) + 3 * steps + rank).to(dtype))
    return parts


def filled_with(layer: nn.Module, *seed: int) -> nn.Module:
    with torch.no_grad():
        for place, parameter in enumerate(layer.parameters()):
            parameter.copy_(tensor(numbers(tuple(parameter.shape), 77, *seed, place)))
    return layer


def assert_near(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}"
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=tolerance, atol=tolerance, msg=lambda m: what + m)


def assert_same_training(comm, ours: nn.Module, serial: nn.Module, shape, tolerance, dtype, steps: int = 3) -> None:
    """Runs both for some steps; compares outputs, all gradients and all buffers."""
    for step in range(steps):
        parts = parts_of(comm, shape, step, dtype=dtype)
        sizes = [len(part) for part in parts]
        whole = torch.cat(parts).requires_grad_()
        upstream = tensor(numbers(tuple(whole.shape), 5, step), dtype)
        serial.zero_grad()
        out = serial(whole)
        out.backward(upstream)

        mine = parts[comm.rank].clone().requires_grad_()
        ours.zero_grad()
        y = ours(mine)
        y.backward(upstream.split(sizes)[comm.rank])
        assert whole.grad is not None and mine.grad is not None
        assert_near(y, out.split(sizes)[comm.rank], tolerance, f"step {step}: output: ")
        assert_near(mine.grad, whole.grad.split(sizes)[comm.rank], tolerance, f"step {step}: input gradient: ")
        for (name, p), q in zip(ours.named_parameters(), serial.parameters(), strict=True):
            assert_near(comm.allreduce(gradient(p)), gradient(q), tolerance, f"step {step}: gradients of {name}: ")
        for (name, p), q in zip(ours.named_buffers(), serial.buffers(), strict=True):
            assert_near(p, q, tolerance, f"step {step}: {name}: ")


@ranks(1, 2, 3, 4, 6, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_training_equals_torch_on_the_concatenated_batch_in_float64(comm):
    options = [{}, {"momentum": None}, {"momentum": 0.7, "eps": 0.3}, {"affine": False}, {"track_running_stats": False}]
    if "bias" in signature(nn.BatchNorm1d).parameters:  # newer versions of torch
        options.append({"bias": False})
    for ours, serial, shape in LAYERS:
        for option in options:
            one = filled_with(ours(CHANNELS, comm, dtype=torch.float64, **option))
            other = filled_with(serial(CHANNELS, dtype=torch.float64, **option))
            assert_same_training(comm, one, other, shape, 1e-10, torch.float64)


@ranks(1, 3, on="threads")
def test_training_equals_torch_in_narrower_floats(comm):
    # (dtype of the batch, of the parameters, tolerance); sixteen bits are rounded in another order than torch's.
    cases = [
        (torch.float32, torch.float32, 1e-5),
        (torch.float16, torch.float32, 1e-2),
        (torch.bfloat16, torch.float32, 6e-2),
        (torch.bfloat16, torch.bfloat16, 6e-2),
        (torch.float16, torch.float16, 1e-2),
    ]
    for dtype, parameters, tolerance in cases:
        one = filled_with(MultiNodeBatchNorm2d(CHANNELS, comm, dtype=parameters))
        other = filled_with(nn.BatchNorm2d(CHANNELS, dtype=parameters))
        assert_same_training(comm, one, other, (3, 2), tolerance, dtype, steps=2)


@ranks(2, 3, on="threads")
def test_frozen_parameters_and_inputs_outside_the_graph(comm):
    parts = parts_of(comm, ())
    sizes = [len(part) for part in parts]
    for frozen in (True, False):
        ours = filled_with(MultiNodeBatchNorm1d(CHANNELS, comm, dtype=torch.float64)).requires_grad_(not frozen)
        serial = filled_with(nn.BatchNorm1d(CHANNELS, dtype=torch.float64)).requires_grad_(not frozen)
        x, whole = parts[comm.rank].clone().requires_grad_(frozen), torch.cat(parts).requires_grad_(frozen)
        upstream = tensor(numbers(tuple(whole.shape), 9))
        serial(whole).backward(upstream)
        ours(x).backward(upstream.split(sizes)[comm.rank])
        if frozen:
            assert x.grad is not None and whole.grad is not None and ours.weight.grad is None
            assert_near(x.grad, whole.grad.split(sizes)[comm.rank], 1e-10, "input gradient")
        else:
            assert x.grad is None
            assert_near(comm.allreduce(gradient(ours.weight)), gradient(serial.weight), 1e-10, "weight")
    with torch.no_grad():
        y = ours(parts[comm.rank])
    assert not y.requires_grad
    assert_near(y, serial(torch.cat(parts)).split(sizes)[comm.rank], 1e-10, "output under no_grad")


@ranks(3, on="threads")
def test_channels_last_stays_channels_last(comm):
    x = tensor(numbers((2, 3, 4, 5), comm.rank)).to(memory_format=torch.channels_last)
    layer = MultiNodeBatchNorm2d(3, comm, dtype=torch.float64)
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_near(y, MultiNodeBatchNorm2d(3, comm, dtype=torch.float64)(x.contiguous()), 1e-12, "values")


@ranks(1, 2, 4, on="threads")
def test_a_mean_far_larger_than_the_spread_costs_no_digits(comm):
    # E[x²] - E[x]² would have an error of about 1e12 * 6e-8 here; a mean that is rounded to float32, one of 1e-3.
    everyone = [tensor(numbers((32, 2, 6, 6), rank)) + 1e6 + rank for rank in range(comm.size)]
    layer = MultiNodeBatchNorm2d(2, comm, momentum=1.0, eps=0.0)
    layer(everyone[comm.rank].float())
    whole = torch.cat([part.float() for part in everyone]).double()
    torch.testing.assert_close(layer.running_var, whole.var((0, 2, 3)).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_mean, whole.mean((0, 2, 3)).float(), rtol=1e-7, atol=0)
    constant = MultiNodeBatchNorm1d(1, comm, momentum=1.0)
    y = constant(torch.full((3, 1), 1e6 / 3))
    assert constant.running_var.item() == 0 and y.abs().max() < 1e-6


@ranks(2, on="threads")
def test_eval_mode_uses_the_running_statistics_and_does_not_communicate(comm):
    layer = filled_with(MultiNodeBatchNorm1d(CHANNELS, comm, dtype=torch.float64))
    layer(parts_of(comm, ())[comm.rank])
    layer.eval()
    plain = nn.BatchNorm1d(CHANNELS, dtype=torch.float64).eval()
    plain.load_state_dict(layer.state_dict())
    before = comm.group.collectives
    if comm.rank == 0:  # one rank alone: it would wait for the other one
        x = tensor(numbers((4, CHANNELS), 3))
        assert torch.equal(layer(x), plain(x))
    assert comm.group.collectives == before


@ranks(2, 3, on="threads")
def test_one_value_per_channel_in_the_whole_batch_is_refused_on_every_rank_as_torch_does(comm):
    layer = MultiNodeBatchNorm1d(2, comm)
    x = torch.ones(1 if comm.rank == 1 else 0, 2)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(x)
    assert layer.num_batches_tracked == 0
    assert_refused(comm, lambda: layer(x), "Expected more than 1 value per channel", f"rank {comm.rank} of {comm.size}")
    assert layer(torch.ones(1, 2)).shape == (1, 2)  # one on every rank is enough


@ranks(2, 3, on="threads")
def test_a_batch_that_is_empty_everywhere_changes_no_statistics(comm):
    layer = MultiNodeBatchNorm2d(2, comm)
    y = layer(torch.empty(0, 2, 3, 3, requires_grad=True))
    y.sum().backward()
    assert y.shape == (0, 2, 3, 3)
    assert layer.running_mean.tolist() == [0, 0] and layer.running_var.tolist() == [1, 1]


@ranks(2, 3, on="threads")
@ranks(2, on="mpi")
def test_a_wrong_input_on_one_rank_is_refused_on_every_rank(comm):
    last = comm.size - 1
    layer = MultiNodeBatchNorm2d(2, comm)
    right = torch.ones(2, 2, 3, 3)
    wrong = {
        "4D": torch.ones(2, 2),
        "2 channels": torch.ones(2, 5, 3, 3),
        "floating-point": torch.ones(2, 2, 3, 3, dtype=torch.int64),
    }
    for words, x in wrong.items():
        given = x if comm.rank == last else right
        assert_refused(comm, lambda x=given: layer(x), f"rank {last}", words, "BatchNorm2d", kind=torchmn.ArgumentError)
    other = MultiNodeBatchNorm2d(3 if comm.rank == last else 2, comm)
    x = torch.ones(2, other.num_features, 3, 3)
    assert_refused(comm, lambda: other(x), "num_features 3", "num_features 2", kind=torchmn.MismatchError)
    for value in ({"eps": 1e-3}, {"momentum": 0.5}, {"dtype": torch.float64}):
        other = MultiNodeBatchNorm2d(2, comm, **(value if comm.rank == last else {}))
        x = right.to(value.get("dtype", torch.float32) if comm.rank == last else torch.float32)
        (name,) = value
        assert_refused(comm, lambda other=other, x=x: other(x), f"{name} {value[name]}", kind=torchmn.MismatchError)
    # Backward would have waited for ever: the last rank has no graph.
    x = right.clone().requires_grad_(comm.rank != last)
    frozen = MultiNodeBatchNorm2d(2, comm, affine=False)
    assert_refused(comm, lambda: frozen(x), "gradients for the input", "nothing", kind=torchmn.MismatchError)


@ranks(2, on="threads")
def test_a_deep_copy_keeps_the_communicator_and_a_pickle_loses_it(comm):
    layer = MultiNodeBatchNorm1d(CHANNELS, comm)
    copied = deepcopy(nn.Sequential(layer, layer))
    assert copied[0] is copied[1] and copied[0] is not layer
    assert copied[0].comm is comm and copied[0].weight is not layer.weight
    x = parts_of(comm, (), dtype=torch.float32)[comm.rank]
    assert torch.equal(copied(x), nn.Sequential(layer, layer)(x))

    unpickled = pickle.loads(pickle.dumps(layer))
    with pytest.raises(torchmn.ArgumentError, match=r"assign one to its \.comm"):
        unpickled(x)
    unpickled.comm = comm
    assert torch.equal(unpickled(x), layer(x))


def test_a_layer_without_a_communicator_is_refused():
    with pytest.raises(torchmn.ArgumentError, match="communicator"):
        MultiNodeBatchNorm2d(3, 1e-5)
