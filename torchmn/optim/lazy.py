"""Lazy parameters of an optimizer: every rank gets rank 0's values when the first forward has given them a shape."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.models import bcast_tensors
from torchmn.optim.gradients import GradientCollection

_OPERATION = "first forward of a lazy module"


class LazyParameters:
    """Gives the lazy modules of an optimizer's parameters their shapes, on all ranks together.

    A lazy module draws the values of its parameters in its first forward, different ones on each rank. So before the
    module's own hook this one does the same, and broadcasts rank 0's values before they are used. All ranks must run
    the first forward of a lazy module; if one calls another operation instead, all raise a MismatchError.

    Args:
        comm: communicator of the ranks.
        collection: the gradients of the optimizer.
        names: of parameters, by id.
        initialized: called on all ranks when a module has its parameters; does not keep the optimizer alive.
    """

    def __init__(
        self,
        comm: Communicator,
        collection: GradientCollection,
        names: Mapping[int, str],
        initialized: weakref.WeakMethod[Callable[[], None]],
    ):
        self._comm, self._collection, self._names, self._initialized = comm, collection, names, initialized
        hook = register_module_forward_pre_hook(_of(self))
        weakref.finalize(self, hook.remove)

    def names(self) -> tuple[str, ...]:
        """Returns the names of the parameters that have no shape yet."""
        return tuple([self._name(p) for p in self._collection.lazy()])

    def before_forward(self, module: Any, inputs: Any) -> None:
        """Called before the forward of any lazy module of this process."""
        ids = {id(p) for p in self._collection.lazy()}
        if not any(id(p) in ids for p in module.parameters(recurse=False)):
            return
        named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        problem = self._initialize(module, inputs)
        self._comm.agree(f"{_OPERATION} {type(module).__name__}", problem)
        bcast_tensors(self._comm, [(self._name(x, name), x) for name, x in named], _OPERATION)
        initialized = self._initialized()
        if initialized is not None:
            initialized()

    def _initialize(self, module: Any, inputs: Any) -> str | None:
        """Lets `module` draw its parameters; returns an error text or None."""
        if not inputs:
            return f"expected a positional argument, got none: call {type(module).__name__} as layer(x)"
        try:
            module.initialize_parameters(*inputs)
        except Exception as error:  # of any type: the other ranks must raise, too
            return f"{type(error).__name__}: {error}"
        return None

    def _name(self, x: Tensor, otherwise: str = "a lazy parameter") -> str:
        return self._names.get(id(x)) or otherwise


def _of(parameters: LazyParameters) -> Callable[[nn.Module, Any], None]:
    """Returns the hook, which does not keep the optimizer alive."""
    reference = weakref.ref(parameters)

    def hook(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, LazyModuleMixin) and (found := reference()) is not None:
            found.before_forward(module, inputs)

    return hook


def not_lazy(named: Any) -> list[tuple[str, Tensor]]:
    """Returns those of `named` that have a shape."""
    return [(name, x) for name, x in named if not is_lazy(x)]
