"""Cutting an nn.Sequential into stages, one per rank, so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from torchmn._torch_compat import own_modules
from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.errors import GraphError, nearest
from torchmn.graph.payload import flatten, restore

_REPEATS = 3
_OPERATION = "MultiNodeChainList.from_sequential"


def stage_of_rank(
    model: nn.Sequential, comm: Communicator, balance: str | Sequence[int], sample: Any
) -> tuple[nn.Sequential | None, int | None, int | None]:
    """Returns this rank's layers (None if it has none), and the ranks of the previous and the next stage or None."""
    counts = layers_per_rank(model, comm, balance, sample)
    owners = [rank for rank, count in enumerate(counts) if count]
    # named_children would leave out a layer that is used twice.
    layers = [(name, layer) for name, layer in own_modules(model).items() if layer is not None]
    firsts = [sum(counts[:rank]) for rank in range(comm.size)]
    stages = [
        nn.Sequential(OrderedDict(layers[first : first + count])) for first, count in zip(firsts, counts, strict=True)
    ]
    _refuse_shared_parameters(stages, comm)
    if not counts[comm.rank]:
        return None, None, None
    place = owners.index(comm.rank)
    before = owners[place - 1] if place else None
    after = owners[place + 1] if place + 1 < len(owners) else None
    return stages[comm.rank], before, after


def layers_per_rank(
    model: nn.Sequential, comm: Communicator, balance: str | Sequence[int], sample: Any
) -> tuple[int, ...]:
    """Returns the number of layers of each rank; a wrong argument on one rank raises on every rank."""
    problem = _problem(model, comm, balance, sample)
    layers = () if problem else tuple(map(_layer_text, model))
    shown = balance if problem or isinstance(balance, str) else tuple(balance)
    comm.agree(_OPERATION, problem, layers=layers, balance=shown)
    if not isinstance(balance, str):
        counts = tuple(balance)
    elif balance == "time":
        counts = balanced(comm.attempt(_OPERATION, lambda: _measure(model, sample), root=0)[0], comm.size)
    else:
        counts = balanced(comm.bcast_obj(parameters(model)), comm.size)
    return counts


def _layer_text(layer: nn.Module) -> str:
    """Returns a layer's class and the shapes of its parameters, which must be the same on all ranks."""
    return " ".join([type(layer).__name__, *(str(tuple(parameter.shape)) for parameter in layer.parameters())])


def _measure(model: nn.Sequential, sample: Any) -> list[float]:
    """Returns the seconds of each layer; raises a ValueError with what a layer raised."""
    try:
        return seconds(model, sample)
    except Exception as error:  # any layer may raise anything, if the sample does not fit
        raise ValueError(f"balance='time': the layers raised on sample: {type(error).__name__}: {error}") from error


def _problem(model: Any, comm: Communicator, balance: Any, sample: Any) -> str | None:
    if not isinstance(model, nn.Sequential):
        return f"expected an nn.Sequential, got {describe(model)}"
    if isinstance(balance, str):
        if balance not in ("parameters", "time"):
            return f"expected balance to be 'parameters', 'time' or a list, got {balance!r}. " + nearest(
                balance, ("parameters", "time")
            )
        if balance == "time" and comm.rank == 0 and sample is None:
            return "balance='time' measures the layers on a small batch: pass it as sample="
        if len(model) < comm.size:
            return (
                f"expected at least as many layers as ranks ({comm.size}), got {len(model)}: use fewer ranks, or "
                "a list such as balance=[1, 1, 0] that leaves ranks out"
            )
        return None
    counts = list(balance) if isinstance(balance, Sequence) else None
    if counts is None or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in counts):
        return f"expected balance to be 'parameters', 'time' or a list of ints >= 0, got {describe(balance)}"
    if len(counts) != comm.size or sum(counts) != len(model) or not counts:
        return f"expected {comm.size} numbers that add up to {len(model)} layers in balance, got {counts}"
    return None


def _refuse_shared_parameters(stages: Sequence[nn.Module], comm: Communicator) -> None:
    homes: dict[int, tuple[int, str]] = {}
    for rank, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            other, first_name = homes.setdefault(id(parameter), (rank, name))
            if other != rank:
                raise GraphError(
                    f"rank {comm.rank} of {comm.size}: {_OPERATION}: {first_name!r} on rank {other} and {name!r} on "
                    f"rank {rank} are one parameter, which cannot be on two ranks: cut elsewhere (balance=[...]), or "
                    "put both layers on one rank with add_link: rank 0 may have the first component and the last"
                )


def parameters(model: nn.Sequential) -> list[float]:
    """Returns the number of parameters of each layer."""
    return [float(sum(parameter.numel() for parameter in layer.parameters())) for layer in model]


def seconds(model: nn.Sequential, sample: Any) -> list[float]:
    """Returns the seconds of forward and backward of each layer on `sample`. Does not change the model."""
    costs = []
    with torch.random.fork_rng():
        for layer in model:
            layer = deepcopy(layer)  # which has running statistics and gradients
            times = []
            for _ in range(_REPEATS + 1):
                layer.zero_grad()
                with torch.enable_grad():
                    received = _as_received(sample)
                    start = perf_counter()
                    result = layer(received)
                    roots = [x for x in flatten(result, keep_objects=True)[0] if x.requires_grad]
                    if roots:
                        torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
                times.append(perf_counter() - start)
            costs.append(median(times[1:]))  # the first is a warm-up
            sample = result
    return costs


def _as_received(result: Any) -> Any:
    """Returns `result` as the next layer would receive it: detached, and needing its gradient.

    A copy that is not a leaf, because the layer may change it in place.
    """
    tensors, structure = flatten(result, keep_objects=True)
    fresh = [x.detach().requires_grad_(x.requires_grad).clone() for x in tensors]
    return restore(structure, iter(fresh))


def balanced(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Returns the sizes of `parts` non-empty runs of `costs` whose largest sum is as small as possible."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n]: the smallest possible largest sum of the first n layers in the runs so far, and the sizes of the runs.
    best: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ()), *[None] * len(costs)]
    for _ in range(parts):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * len(best)
        for start, so_far in enumerate(best):
            if so_far is None:
                continue
            for end in range(start + 1, len(best)):
                candidate = max(so_far[0], sums[end] - sums[start]), (*so_far[1], end - start)
                current = following[end]
                if current is None or candidate < current:
                    following[end] = candidate
        best = following
    solution = best[-1]
    assert solution is not None
    return solution[1]
