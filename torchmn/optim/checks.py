"""Which optimizers can be wrapped."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from torchmn.communicators.base import Communicator
from torchmn.communicators.watchdog import Wait
from torchmn.errors import ArgumentError, TorchMNError
from torchmn.nn.parts.roles import replicas_of
from torchmn.optim.wrapper import WrappedOptimizer

# These compute each element of a parameter from that element alone, so a slice steps as the whole would.
_ELEMENT_BY_ELEMENT = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
    "SparseAdam",
)
# How a step is computed, and not what comes out: ranks may differ in it.
_ONLY_SPEED = ("foreach", "fused", "capturable", "differentiable")


def check_model(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise if `optimizer` was made for another model than `model`; let a parallel one look at its parameters."""
    parallelism = getattr(model, "parallelism", None)
    if parallelism is not None:
        parallelism.adopt(model)  # slices must be known as such before anything is sent
    own = {id(p) for p in model.parameters()}
    if own and not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ArgumentError(
            f"create_multi_node_optimizer: {type(optimizer).__name__} holds none of the parameters of `model`, which "
            "it would never change. parallelize works on a copy: make the optimizer of the model that it returns"
        )


def check_slices(optimizer: Optimizer) -> None:
    """Raise, or warn, if an optimizer of slices needs whole parameters: norms and products over all their elements."""
    sliced = any(replicas_of(p) is not None for group in optimizer.param_groups for p in group["params"])
    kind = type(optimizer)
    if not sliced or any(base.__name__ in _ELEMENT_BY_ELEMENT for base in kind.__mro__):
        return
    problem = (
        f"{kind.__name__} may compute over whole parameters, of which split layers hold slices: numbers could differ "
        "from those of one rank. Use SGD, Adam or another optimizer that works element by element, or mode='datapar'"
    )
    if kind.__module__.startswith("torch.optim"):
        raise ArgumentError(f"create_multi_node_optimizer: {problem}")
    warnings.warn(problem, stacklevel=4)


def check_alike(optimizer: Optimizer, comm: Communicator) -> None:
    """Raise on every rank where ranks would not make the same steps: another class, or another learning rate, say."""
    groups = {f"group {number}": _values(group) for number, group in enumerate(optimizer.param_groups)}
    said = {"optimizer": type(optimizer).__name__, **groups}
    with Wait(comm, "create_multi_node_optimizer"):
        comm._meet("create_multi_node_optimizer", None, tuple(said), tuple(said.values()))


def _values(group: dict[str, Any]) -> str:
    """The plain values of a group. Tensors and functions are left out: their texts say nothing, or where they lie."""
    plain = (bool, int, float, str, tuple)
    kept = {name: value for name, value in group.items() if isinstance(value, plain) and name not in _ONLY_SPEED}
    return f"({', '.join(f'{name} {value}' for name, value in kept.items())})"


def check_optimizer(optimizer: object) -> None:
    """Raise if `optimizer` can not be wrapped."""
    if isinstance(optimizer, WrappedOptimizer):
        raise TorchMNError("create_multi_node_optimizer: this optimizer is a multi-node optimizer already")
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"create_multi_node_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
