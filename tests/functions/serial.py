"""A communication compared with the same computation on one rank: values, gradients, and gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


def leaf(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that need a gradient; the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()


def tupled(result: Tensor | Tensors) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def scores(tensors: Tensors, rank: int) -> Tensor:
    """A number that depends on every element differently, and not linearly."""
    total = torch.zeros((), dtype=torch.float64)
    for place, x in enumerate(tensors):
        weights = leaf(*x.shape, seed=31 * rank + place).detach()
        total = total + (x.double().sin() * weights).sum()
    return total


def check_adjoint(comm, function: Callable, inputs: Tensors) -> None:
    """<F x, y> = <x, F* y>, summed over ranks; `function` must be linear."""
    outputs = [y for y in tupled(function(*inputs)) if y.requires_grad]
    weights = [leaf(*y.shape, seed=500 + 31 * comm.rank + n).detach() for n, y in enumerate(outputs)]
    there = sum(((y * w).sum() for y, w in zip(outputs, weights, strict=True)), torch.zeros((), dtype=torch.float64))
    there.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
    back = sum(((x * g).sum() for x, g in zip(inputs, gradients, strict=True)), torch.zeros((), dtype=torch.float64))
    sums = comm.allreduce(torch.stack([there.detach(), back.detach()]))
    assert sums[0] != 0
    torch.testing.assert_close(sums[0], sums[1])


def check_against_serial(
    comm, function: Callable, serial: Callable, inputs_of: Callable[[int], Tensors], orders: int = 2
) -> None:
    """`function(*inputs_of(rank))` on every rank, beside `serial([inputs of all ranks])`, which returns all outputs.

    The loss of order n+1 is made of the gradients of the loss of order n.
    """
    mine = inputs_of(comm.rank)
    inputs_by_rank = [inputs_of(rank) for rank in range(comm.size)]
    results = tupled(function(*mine))
    expected = [tupled(result) for result in serial(inputs_by_rank)]
    for got, right in zip(results, expected[comm.rank], strict=True):
        torch.testing.assert_close(got, right)
    loss = scores(results, comm.rank)
    expected_loss = sum(scores(result, rank) for rank, result in enumerate(expected))
    for _ in range(orders):
        gradients = torch.autograd.grad(loss, mine, create_graph=True)
        flat = torch.autograd.grad(expected_loss, [x for inputs in inputs_by_rank for x in inputs], create_graph=True)
        remaining = iter(flat)
        per_rank = [[next(remaining) for _ in inputs] for inputs in inputs_by_rank]
        for got, right in zip(gradients, per_rank[comm.rank], strict=True):
            torch.testing.assert_close(got, right)
        loss = scores(gradients, comm.rank)
        expected_loss = sum(scores(each, rank) for rank, each in enumerate(per_rank))
