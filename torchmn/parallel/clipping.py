"""Clipping gradients of which ranks hold slices: by the norm of the whole, which is the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.graph import MultiNodeChainList


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of `model`, which are scaled down so that it is at most `max_norm`. On every rank.

    As `torch.nn.utils.clip_grad_norm_`, also for the model that `parallelize` made: there ranks hold slices of some
    parameters, and torch's function would scale each rank's by a norm of its own. Call `optimizer.synchronize()`
    first: before it, gradients are a rank's shares. Of a MultiNodeChainList it is the norm over all of its ranks, which
    must all call it.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"clip_grad_norm_: expected the model itself, not its parameters, got {type(model).__name__}"
        )
    if not norm_type > 0:
        raise ArgumentError(f"clip_grad_norm_: expected norm_type > 0, got {norm_type}")
    largest = norm_type == float("inf")
    powers, clipped = [], []
    for gradients, comm in _shares(model, max_norm, norm_type):
        power = _power(gradients, norm_type)
        powers.append(power if comm is None else comm.allreduce(power, "max" if largest else "sum"))
        clipped += gradients
    together = torch.stack(powers)
    norm = together.max() if largest else together.sum() ** (1.0 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's formula
    for gradient in clipped:
        gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


def _shares(model: nn.Module, max_norm: float, norm_type: float) -> Iterator[tuple[list[Tensor], Communicator | None]]:
    """The gradients that this rank has, and the ranks that have others of the same model; None if these are all."""
    counted: set[int] = set()
    for chain in (module for module in model.modules() if isinstance(module, MultiNodeChainList)):
        comm = chain.require_comm()
        _check_chain(chain, comm, max_norm, norm_type)
        here = [p for p in chain.parameters() if id(p) not in counted]
        counted.update(map(id, here))
        yield [p.grad for p in here if p.grad is not None], comm
    rest = [p for p in model.parameters() if p.grad is not None and id(p) not in counted]
    parallelism = getattr(model, "parallelism", None)
    tiles = parallelism.grid.tiles if parallelism is not None and parallelism.grid.tiles.size > 1 else None
    yield [p.grad for p in rest if p.grad is not None and role_of(p).over is None], None
    yield [p.grad for p in rest if p.grad is not None and role_of(p).over is not None], tiles


def _check_chain(chain: MultiNodeChainList, comm: Communicator, max_norm: float, norm_type: float) -> None:
    problem = None
    if any(getattr(module, "parallelism", None) is not None for module in chain.modules()):
        # Its ranks hold some parameters several times and slices of others, which a sum over the chain would mix up.
        problem = "a component of this chain went through parallelize: the norm of such a chain is not supported"
    comm.agree("clip_grad_norm_", problem, max_norm=float(max_norm), norm_type=float(norm_type))


def _power(gradients: list[Tensor], norm_type: float) -> Tensor:
    """The sum of powers of all elements, or their largest; in double precision, so that the order does not show."""
    if norm_type == float("inf"):
        return max(
            (g.abs().max().double().cpu() for g in gradients if g.numel()), default=torch.zeros((), dtype=torch.float64)
        )
    return sum((g.abs().double().pow(norm_type).sum().cpu() for g in gradients), torch.zeros((), dtype=torch.float64))
