"""Checks of `create_multi_node_optimizer`: which optimizers can be wrapped, and what must be the same on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn.communicators.communicator import Communicator
from torchmn.gradient_role import role_of
from torchmn.optim.combined import CombinedOptimizer
from torchmn.optim.wrapper import WrappedOptimizer

OPERATION = "create_multi_node_optimizer"

# They update each element of a parameter independently, so a step of a slice equals that of the whole parameter.
_ELEMENT_BY_ELEMENT = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
    "SparseAdam",
)

# Options that change how a step is computed, not its result: they may differ between ranks.
_ONLY_SPEED = ("foreach", "fused", "capturable", "differentiable")
_PLAIN = (bool, int, float, str, tuple)
_WIRE_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32)


def check(optimizer: Any, comm: Communicator, model: nn.Module | None, options: Mapping[str, Any]) -> None:
    """Raises on every rank if one cannot wrap its optimizer, or if ranks would make different steps.

    Args:
        optimizer: to wrap.
        comm: communicator of the ranks.
        model: whose parameters it has, or None.
        options: arguments of `create_multi_node_optimizer` that must be the same on all ranks.
    """
    problem = _option_problem(options) or _optimizer_problem(optimizer)
    if problem is None and model is not None:
        problem = _model_problem(optimizer, model) or _chain_problem(model, comm)
    problem = problem or _slice_problem(optimizer)
    same = {} if problem else {"optimizer": type(optimizer).__name__, **groups_as_text(optimizer), **options}
    comm.agree(OPERATION, problem, **same)


def groups_as_text(optimizer: Optimizer, first: int = 0) -> dict[str, str]:
    """Returns what must be the same on all ranks (learning rate, momentum, ...) of the groups from `first` on."""
    return {f"group {n}": _values(group) for n, group in enumerate(optimizer.param_groups) if n >= first}


def _values(group: dict[str, Any]) -> str:
    """Returns the plain values of a group as text, without objects whose text is an address."""
    values = {name: _plain_value(value) for name, value in group.items() if name not in _ONLY_SPEED}
    return f"({', '.join(f'{name} {value}' for name, value in values.items() if value is not None)})"


def hyperparameters(optimizer: Optimizer) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Returns the current hyperparameters of each group: learning rate, momentum, betas, ..."""
    groups = []
    for group in optimizer.param_groups:
        named = []
        for name in optimizer.defaults:
            if name not in _ONLY_SPEED:
                value = group.get(name)
                plain = value if isinstance(value, _PLAIN) else _plain_value(value)
                if plain is not None:
                    named.append((name, plain))
        groups.append(tuple(named))
    return tuple(groups)


def _plain_value(value: Any) -> Any:
    """Returns a value that ranks can compare; None for others, and for numbers on a GPU, to avoid a wait."""
    if isinstance(value, Tensor):
        return value.item() if value.is_cpu and value.dim() == 0 else None
    return value if isinstance(value, _PLAIN) else None


def _option_problem(options: Mapping[str, Any]) -> str | None:
    if options["double_buffering"] and options["overlap"]:
        return "expected double_buffering or overlap, got both: each hides the same communication"
    if options["grad_dtype"] not in _WIRE_DTYPES:
        return f"expected grad_dtype to be torch.float16, torch.bfloat16 or None, got {options['grad_dtype']!r}"
    return None


def _optimizer_problem(optimizer: Any) -> str | None:
    if isinstance(optimizer, WrappedOptimizer):
        return "this optimizer is a multi-node optimizer already"
    if not isinstance(optimizer, Optimizer):
        return f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
    return None


def _model_problem(optimizer: Optimizer, model: Any) -> str | None:
    """Returns an error text if `optimizer` has other parameters than `model`; marks those of a parallel model."""
    if not isinstance(model, nn.Module):
        return f"expected model to be a torch.nn.Module, got {type(model).__name__}"
    parallelism = getattr(model, "parallelism", None)
    if parallelism is not None:
        parallelism.adopt(model)  # marks slices, before anything is sent
    own = {id(p) for p in model.parameters()}
    if own and not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        return (
            f"{type(optimizer).__name__} holds none of the parameters of `model`, which it would never change. "
            "parallelize works on a copy: make the optimizer of the model that it returns"
        )
    return None


def _chain_problem(model: nn.Module, comm: Communicator) -> str | None:
    """Returns an error text if ranks of `comm` hold different components of a chain, whose gradients it would mix."""
    chains: list[Any] = [module for module in model.modules() if getattr(module, "differs_between_ranks", False)]
    for chain in chains:
        if chain.comm is not None:
            shared = set(chain.comm.world_ranks) & set(comm.world_ranks)
            if len(shared) > 1:
                return (
                    f"`model` is a MultiNodeChainList whose ranks hold different components, and {len(shared)} of them "
                    "would average their gradients. Use the torch optimizer without wrapping it: it updates its rank's "
                    "parameters. For several such chains, pass the communicator of the ranks with the same component"
                )
    return None


def _slice_problem(optimizer: Optimizer) -> str | None:
    """Returns an error text if an optimizer of slices may need whole parameters; warns for classes outside of torch."""
    if isinstance(optimizer, CombinedOptimizer):
        return next((problem for part in optimizer.parts if (problem := _slice_problem(part)) is not None), None)
    sliced = any(role_of(p).over is not None for group in optimizer.param_groups for p in group["params"])
    kind = type(optimizer)
    if not sliced or any(base.__name__ in _ELEMENT_BY_ELEMENT for base in kind.__mro__):
        return None
    problem = (
        f"{kind.__name__} may compute over whole parameters, of which split layers hold slices: numbers could differ "
        "from those of one rank. Use SGD, Adam or another optimizer that works element by element, or mode='datapar'"
    )
    if kind.__module__.startswith("torch.optim"):
        return problem
    warnings.warn(problem, stacklevel=4)
    return None
