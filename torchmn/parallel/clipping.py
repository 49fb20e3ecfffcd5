"""clip_grad_norm_: gradient clipping by the norm over all ranks, if ranks hold different parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.graph import MultiNodeChainList


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales the gradients of `model` so that their norm over all ranks is at most `max_norm`, and returns the norm.

    Like `torch.nn.utils.clip_grad_norm_`, but right for models that `parallelize` returned, of which ranks hold slices
    of some parameters, and for a MultiNodeChainList. All ranks must call it. Call `optimizer.synchronize()` first:
    before that, gradients are contributions of one rank.

    Args:
        model: the model itself, not its parameters.
        max_norm: the largest norm of the gradients after the call.
        norm_type: of the norm, such as 2.0 or `float("inf")`.

    Returns:
        The norm before clipping, a 0-d tensor, the same on every rank.

    Raises:
        ArgumentError: if an argument is wrong, or differs between the ranks of a MultiNodeChainList.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"clip_grad_norm_: expected the model itself, not its parameters, got {type(model).__name__}"
        )
    if not norm_type > 0:
        raise ArgumentError(f"clip_grad_norm_: expected norm_type > 0, got {norm_type}")
    collected = list(_gradients_by_ranks(model, max_norm, norm_type))
    norm = _norm(collected, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch's formula
    for gradients, _ in collected:
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device, gradient.dtype))
    return norm


@torch.no_grad()
def gradient_norm(model: nn.Module) -> float:
    """Returns the norm of all gradients of a model after its optimizer's step, the same on every rank.

    The gradient of a parameter of which ranks hold slices is counted once. Every rank must call it.

    Args:
        model: a plain model, one that `torchmn.parallelize` returned, or a MultiNodeChainList.

    Returns:
        The norm.
    """
    return float(_norm(list(_gradients_by_ranks(model, float("inf"), 2.0)), 2.0))


def _norm(collected: Sequence[tuple[list[Tensor], Communicator | None]], norm_type: float) -> Tensor:
    """Returns the norm of the gradients of all ranks, given what `_gradients_by_ranks` yields."""
    largest = norm_type == float("inf")
    powers = []
    for gradients, comm in collected:
        power = _power(gradients, norm_type)
        powers.append(power if comm is None else comm.allreduce(power, "max" if largest else "sum"))
    stacked = torch.stack(powers)
    return stacked.max() if largest else stacked.sum() ** (1.0 / norm_type)


def _gradients_by_ranks(
    model: nn.Module, max_norm: float, norm_type: float
) -> Iterator[tuple[list[Tensor], Communicator | None]]:
    """Yields gradients of this rank, with the ranks that have further ones of the same layers; None if none has."""
    counted: set[int] = set()
    for chain in (module for module in model.modules() if isinstance(module, MultiNodeChainList)):
        comm = chain.require_comm()
        _check_chain(chain, comm, max_norm, norm_type)
        parameters = [p for p in chain.parameters() if id(p) not in counted]
        counted.update(map(id, parameters))
        yield [p.grad for p in parameters if p.grad is not None], comm
    rest = [p for p in model.parameters() if p.grad is not None and id(p) not in counted]
    parallelism = getattr(model, "parallelism", None)
    tiles = parallelism.grid.tiles if parallelism is not None and parallelism.grid.tiles.size > 1 else None
    yield [p.grad for p in rest if p.grad is not None and role_of(p).over is None], None
    yield [p.grad for p in rest if p.grad is not None and role_of(p).over is not None], tiles


def _check_chain(chain: MultiNodeChainList, comm: Communicator, max_norm: float, norm_type: float) -> None:
    problem = None
    if any(getattr(module, "parallelism", None) is not None for module in chain.modules()):
        # Its ranks have replicas of some parameters and slices of others; a sum over the chain would count both.
        problem = "a component of this chain went through parallelize: the norm of such a chain is not supported"
    comm.agree("clip_grad_norm_", problem, max_norm=float(max_norm), norm_type=float(norm_type))


def _power(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Returns the sum of powers of all elements, or the largest; in double precision, which hides the order of sums."""
    if norm_type == float("inf"):
        return max(
            (g.abs().max().double().cpu() for g in gradients if g.numel()), default=torch.zeros((), dtype=torch.float64)
        )
    return sum((g.abs().double().pow(norm_type).sum().cpu() for g in gradients), torch.zeros((), dtype=torch.float64))
