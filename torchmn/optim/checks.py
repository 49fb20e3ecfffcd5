"""Which optimizers can be wrapped."""

from __future__ import annotations

import warnings

from torch import nn
from torch.optim import Optimizer

from torchmn.errors import ArgumentError, TorchMNError
from torchmn.nn.parts.roles import replicas_of
from torchmn.optim.wrapper import WrappedOptimizer

# These compute each element of a parameter from that element alone, so a slice steps as the whole would.
_ELEMENT_BY_ELEMENT = (
    *("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"),
    "SparseAdam",
)


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


def check_optimizer(optimizer: object) -> None:
    """Raise if `optimizer` can not be wrapped."""
    if isinstance(optimizer, WrappedOptimizer):
        raise TorchMNError("create_multi_node_optimizer: this optimizer is a multi-node optimizer already")
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"create_multi_node_optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
