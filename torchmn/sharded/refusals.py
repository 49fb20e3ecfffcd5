"""Errors that name the module of the user's model in which they happened."""

from __future__ import annotations

import sys
import weakref
from typing import NoReturn

from torch import nn
from torch.utils import checkpoint

from torchmn.errors import ParallelizeError

# The names of the modules of parallelized models, so that an error deep inside a rule can say where it happened.
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def remember_names(model: nn.Module) -> None:
    """Let errors in rules name the modules of `model`."""
    for name, module in model.named_modules():
        _names[module] = name or type(module).__name__


def module_here() -> nn.Module | None:
    """The innermost module whose forward is running; found by walking the stack, which only errors pay for."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in _names and frame.f_code.co_name != "_call_impl":
            return owner
        frame = frame.f_back
    return None


def where() -> str:
    """Words for the innermost running module: `conv2 (Conv2d(...))`."""
    module = module_here()
    if module is None:
        return "the model"
    inner = repr(module) if not any(module.children()) else type(module).__name__
    return f"{_names[module]} ({inner})"


def refuse(problem: str) -> NoReturn:
    """Raise, naming the running module."""
    raise ParallelizeError(f"{where()}: {problem}")


def refuse_in_checkpoint(function: str) -> None:
    """Raise if this runs in a part of the model that `torch.utils.checkpoint` will compute again.

    That happens during backward, outside of the model's forward: what depends on which samples this rank has, or on
    random numbers that ranks share, would be computed in another way than the first time.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            refuse(
                f"{function} in a part that torch.utils.checkpoint computes again would not give the same again on "
                "this grid. Leave it out of the checkpointed part"
            )
        frame = frame.f_back
