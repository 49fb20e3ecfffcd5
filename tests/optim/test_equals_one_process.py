"""Training on many ranks gives the losses and parameters of one process on the whole batch."""

from __future__ import annotations

import pytest
import torch

import torchmn
from tests._worlds.marks import ranks
from tests.optim.problem import OPTIMIZERS, STEPS, assert_close, batch, loss_of, make_model, serial_run, uneven
from torchmn.optim import create_multi_node_optimizer


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_equal_batches(comm, name: str) -> None:
    losses, parameters = serial_run(name)
    model = make_model(seed=comm.rank)  # rank 0's values must reach the others
    optimizer = create_multi_node_optimizer(OPTIMIZERS[name](model.parameters()), comm, model=model)
    for step in range(STEPS):
        x, y = (part.chunk(comm.size)[comm.rank] for part in batch(step))
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        assert comm.allreduce(loss.detach(), "mean").item() == pytest.approx(losses[step], rel=1e-10)
    assert_close([p.detach() for p in model.parameters()], parameters)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_unequal_batches_with_their_sizes_as_weights(comm, name: str) -> None:
    _, parameters = serial_run(name)
    model = make_model()
    optimizer = create_multi_node_optimizer(OPTIMIZERS[name](model.parameters()), comm)
    for step in range(STEPS):
        x, y = (part[uneven(comm)] for part in batch(step))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        optimizer.step(weight=len(x))
    assert_close([p.detach() for p in model.parameters()], parameters)


@ranks(3)
@pytest.mark.parametrize("options", [{}, {"double_buffering": True}])
def test_unequal_batches_of_which_one_has_the_mean_size(comm, options: dict) -> None:
    serial, model = make_model(), make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, **options)
    x, y = batch(0)
    grads = torch.autograd.grad(loss_of(serial, x, y), list(serial.parameters()))
    mine = slice(*((0, 1), (1, 5), (5, 12))[comm.rank])  # rank 1 counts 4/12, as if all ranks had equally many
    loss_of(model, x[mine], y[mine]).backward()
    optimizer.step(weight=mine.stop - mine.start)
    optimizer.flush()
    expected = [p.detach() - 0.1 * grad for p, grad in zip(serial.parameters(), grads, strict=True)]
    assert_close([p.detach() for p in model.parameters()], expected)


@ranks(2, 3, on=("threads", "mpi"))
def test_unequal_batches_through_batch_norm_need_weighed_losses(comm) -> None:
    def with_norm() -> torch.nn.Sequential:
        return torch.nn.Sequential(make_model(), torch.nn.BatchNorm1d(2).double())

    serial = with_norm()
    inner = OPTIMIZERS["sgd"](serial.parameters())
    model = torchmn.create_mnbn_model(with_norm(), comm)
    optimizer = create_multi_node_optimizer(OPTIMIZERS["sgd"](model.parameters()), comm, model=model)
    for step in range(STEPS):
        x, y = batch(step)
        inner.zero_grad()
        loss_of(serial, x, y).backward()
        inner.step()
        mine = uneven(comm)
        optimizer.zero_grad()
        loss = loss_of(model, x[mine], y[mine])
        if step == 0:
            loss.backward(retain_graph=True)
            with pytest.raises(torchmn.ArgumentError, match=r"gradients of 1 have crossed ranks.*optimizer.weigh"):
                optimizer.step(weight=len(x[mine]))
            optimizer.zero_grad()
        optimizer.weigh(loss, len(x[mine])).backward()
        optimizer.step()
    for a, b in zip(model.state_dict().values(), serial.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@ranks(2, 3)
def test_a_rank_without_samples_does_not_count(comm) -> None:
    _, parameters = serial_run("sgd")
    model = make_model()
    optimizer = create_multi_node_optimizer(OPTIMIZERS["sgd"](model.parameters()), comm)
    for step in range(STEPS):
        x, y = (part if comm.rank == comm.size - 1 else part[:0] for part in batch(step))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()  # 0/0 = NaN on a rank with no samples
        optimizer.step(weight=len(x))
    assert_close([p.detach() for p in model.parameters()], parameters)


@ranks(1, 2, 3)
@ranks(4, on="threads")
def test_accumulated_gradients(comm) -> None:
    _, parameters = serial_run("adam")
    model = make_model()
    optimizer = create_multi_node_optimizer(OPTIMIZERS["adam"](model.parameters()), comm)
    for step in range(STEPS):
        x, y = (part.chunk(comm.size)[comm.rank] for part in batch(step))
        half = len(x) // 2
        share = half / len(x)
        optimizer.zero_grad()
        with optimizer.no_sync():
            (loss_of(model, x[:half], y[:half]) * share).backward()
        (loss_of(model, x[half:], y[half:]) * (1 - share)).backward()
        optimizer.step()
    assert_close([p.detach() for p in model.parameters()], parameters)


@ranks(1, 2, 3, 4)
def test_double_buffering_is_one_process_with_gradients_of_the_step_before(comm) -> None:
    serial = make_model()
    inner = OPTIMIZERS["sgd"](serial.parameters())
    model = make_model()
    optimizer = create_multi_node_optimizer(OPTIMIZERS["sgd"](model.parameters()), comm, double_buffering=True)
    previous = None
    for step in range(STEPS):
        x, y = batch(step)
        now = torch.autograd.grad(loss_of(serial, x, y), list(serial.parameters()))
        _apply(inner, serial, previous)
        previous = now
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # zeroing in place must not reach gradients under way
        loss_of(model, *(part.chunk(comm.size)[comm.rank] for part in (x, y))).backward()
        optimizer.step()
        assert_close([p.detach() for p in model.parameters()], [p.detach() for p in serial.parameters()])
    _apply(inner, serial, previous)
    optimizer.flush()
    optimizer.flush()  # twice is fine: the second has nothing to apply
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in serial.parameters()])


def _apply(optimizer: torch.optim.Optimizer, model: torch.nn.Module, grads) -> None:
    if grads is None:
        return
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    optimizer.step()


@ranks(1, 2, 3)
def test_lbfgs_searches_the_same_line_on_all_ranks(comm) -> None:
    serial = make_model()
    inner = torch.optim.LBFGS(serial.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    model = make_model()
    actual = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    optimizer = create_multi_node_optimizer(actual, comm)
    for step in range(3):
        x, y = batch(step)
        mine = slice(None) if comm.size == 1 else uneven(comm)

        def serial_closure(x=x, y=y) -> torch.Tensor:
            inner.zero_grad()
            loss = loss_of(serial, x, y)
            loss.backward()
            return loss

        def closure(x=x[mine], y=y[mine]) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        expected = inner.step(serial_closure)
        found = optimizer.step(closure, weight=len(x[mine]))
        assert float(found) == pytest.approx(expected.item(), rel=1e-9)
    for a, b in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


@ranks(1, 2, 3)
def test_sparse_gradients_of_an_embedding(comm) -> None:
    def embedding() -> torch.nn.Embedding:
        table = torch.nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
        table.weight.data = torch.arange(30.0, dtype=torch.float64).view(10, 3)
        return table

    words = torch.tensor([[1, 1], [2, 7], [7, 9], [1, 3], [4, 4], [9, 1]])
    serial, model = embedding(), embedding()
    inner = torch.optim.SGD(serial.parameters(), lr=0.1)
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    mine = words[uneven(comm, len(words))]
    for _ in range(3):
        inner.zero_grad()
        serial(words).sin().mean().backward()
        inner.step()
        optimizer.zero_grad()
        model(mine).sin().mean().backward()
        optimizer.step(weight=len(mine))
    assert_close([model.weight.detach()], [serial.weight.detach()])


@ranks(2, 3)
@pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16])
def test_compressed_gradients_are_the_mean_rounded_twice(comm, wire: torch.dtype) -> None:
    model = torch.nn.Linear(300, 7)
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, grad_dtype=wire)
    values = [torch.randn(7, 300, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
    model.weight.grad = values[comm.rank].clone()
    model.bias.grad = torch.ones(7)
    optimizer.synchronize()
    expected = (torch.stack([value.to(wire).float() for value in values]).sum(0) / comm.size).to(wire).float()
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-6, atol=0)
    assert torch.equal(model.bias.grad, torch.ones(7))
