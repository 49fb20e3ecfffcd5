"""torch.func, saved-tensor hooks and tracers with a parallel model: the numbers of one rank, or an error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

import torchmn
from tests.parallel.training import tile_of
from tests.sharded.parity import numbers
from torchmn._torch_compat import top_saved_tensor_hooks
from torchmn.errors import MismatchError, ParallelizeError
from torchmn.parallel import parallelize

SHAPE = (2, 8, 6)
X, Y = numbers((4, *SHAPE)), torch.arange(4) % 3


def small_net():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, padding=1), nn.Flatten(), nn.Linear(144, 3)
    ).double()


NET = small_net()


def on_two_tiles(body):
    """What `body(model, tile, grid)` returns on two ranks."""

    def rank(comm):
        grid = torchmn.ProcessGrid(comm, height=2)
        return body(parallelize(NET, grid, "halopar"), tile_of(X, grid), grid)

    return torchmn.run_threads(rank, 2)


def others(model, names):
    return {n: (p.detach() * 1.5).requires_grad_() for n, p in model.named_parameters() if n in names}


@pytest.mark.parametrize("names", [["0.weight", "0.bias"], ["2.weight"], [n for n, _ in NET.named_parameters()][:4]])
@pytest.mark.parametrize("after_a_forward", [False, True])
def test_functional_call_has_one_ranks_loss_and_gradients_and_leaves_training_as_it_is(names, after_a_forward):
    given = others(NET, names)
    expected = F.cross_entropy(functional_call(NET, given, (X,)), Y)
    gradients = torch.autograd.grad(expected, list(given.values()))
    trained = torch.autograd.grad(F.cross_entropy(NET(X), Y), list(NET.parameters()))

    def body(model, tile, grid):
        if after_a_forward:
            model(tile)
        given = others(model, names)
        loss = F.cross_entropy(functional_call(model, given, (tile,)), Y)
        loss.backward()
        model.zero_grad()
        F.cross_entropy(model(tile), Y).backward()  # the model's own parameters have their roles all the same
        optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), grid, model=model)
        optimizer.synchronize()
        return loss.detach(), [x.grad for x in given.values()], [model[0].weight.grad, model[2].bias.grad]

    for loss, found, own in on_two_tiles(body):
        torch.testing.assert_close((loss, found), (expected.detach(), list(gradients)))
        torch.testing.assert_close(own, [trained[0], trained[3]])


@pytest.mark.parametrize("shape", [SHAPE, None], ids=["input_shape given", "input_shape found in the first forward"])
def test_slices_of_parameters_can_be_given(shape):
    given = {n: p.detach() * 1.5 for n, p in NET.named_parameters()}

    def body(comm):
        model = parallelize(NET, comm, "modelpar", input_shape=shape)
        return functional_call(model, {n: p.detach() * 1.5 for n, p in model.named_parameters()}, (X,)).detach()

    for logits in torchmn.run_threads(body, 2):
        torch.testing.assert_close(logits, functional_call(NET, given, (X,)))


def test_parameters_that_were_updated_with_one_ranks_gradient_are_refused_on_all_ranks():
    def body(model, tile, grid):
        loss = F.cross_entropy(model(tile), Y)
        gradient = torch.autograd.grad(loss, model[0].weight)[0]
        with pytest.raises(MismatchError, match=r"different values of 0\.weight.*contribution to the gradient"):
            functional_call(model, {"0.weight": model[0].weight - gradient}, (tile,))
        mean = grid.comm.allreduce(gradient, "mean")
        return functional_call(model, {"0.weight": model[0].weight - mean}, (tile,)).detach()

    gradient = torch.autograd.grad(F.cross_entropy(NET(X), Y), NET[0].weight)[0]
    for logits in on_two_tiles(body):
        expected = functional_call(NET, {"0.weight": NET[0].weight - gradient}, (X,))
        torch.testing.assert_close(logits, expected.detach())


def as_bytes(x):
    return x.detach().numpy().tobytes(), x.shape, x.dtype


def from_bytes(kept):
    return torch.frombuffer(bytearray(kept[0]), dtype=kept[2]).view(kept[1])


WAYS = {
    "save_on_cpu": (torch.autograd.graph.save_on_cpu, lambda model, x: model(x)),
    "hooks that need values": (
        lambda: torch.autograd.graph.saved_tensors_hooks(as_bytes, from_bytes),
        lambda model, x: model(x),
    ),
    "checkpoint of the whole": (torch.enable_grad, lambda model, x: checkpoint(model, x, use_reentrant=False)),
}


@pytest.mark.skipif(top_saved_tensor_hooks is None, reason="torch 2.6 does not show its saved-tensor hooks")
@pytest.mark.parametrize("way", WAYS)
def test_activation_saving_hooks_work_from_the_first_forward_on(way):
    around, call = WAYS[way]
    trained = torch.autograd.grad(F.cross_entropy(NET(X), Y), list(NET.parameters()))

    def body(model, tile, grid):
        optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), grid, model=model)
        with around():
            loss = F.cross_entropy(call(model, tile), Y)
        loss.backward()
        optimizer.synchronize()
        return [model[0].weight.grad, model[2].bias.grad]

    for found in on_two_tiles(body):
        torch.testing.assert_close(found, [trained[0], trained[3]])


@pytest.mark.guard("tracing")
def test_tracing_and_transforming_a_forward_is_refused_with_a_hint():
    def body(model, tile, grid):
        with pytest.raises(ParallelizeError, match=r"torch\.func .*use backward"):
            grad(lambda x: model(x).sum())(tile)
        with pytest.raises(ParallelizeError, match=r"torch\.jit\.trace .*full_state_dict"):
            torch.jit.trace(model, (tile,), check_trace=False)
        with pytest.raises(torchmn.ArgumentError, match=r"torch\.jit\.trace records"):
            torch.jit.trace(lambda x: torchmn.functions.allreduce(grid.comm, x * 2), (tile,), check_trace=False)

    on_two_tiles(body)
