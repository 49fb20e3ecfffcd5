"""How a rule says which torch functions it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn.nn.parts import part

AnyRule = TypeVar("AnyRule", bound=Callable[..., Any])
_HOMES = (torch, F, Tensor, torch._C._nn, torch.special)  # type: ignore[attr-defined]


def names(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def functions_named(name: str) -> list[Any]:
    """Every function of that name: torch.relu, F.relu, Tensor.relu are one to a user."""
    found = [getattr(home, name) for home in _HOMES if hasattr(home, name)]
    return [getattr(f, "__get__", f) if not callable(f) else f for f in found]


def _functions(which: str | Callable[..., Any]) -> list[Any]:
    return functions_named(which) if isinstance(which, str) else [which]


def rule(*functions: str | Callable[..., Any]) -> Callable[[AnyRule], AnyRule]:
    """Registers a rule for these torch functions, or every one of a name. In it, Parts compute as plain tensors."""

    def register(function: AnyRule) -> AnyRule:
        for which in functions:
            for torch_function in _functions(which):
                part.RULES[torch_function] = function
        return function

    return register


def composed(*functions: str | Callable[..., Any]) -> Callable[[AnyRule], AnyRule]:
    """Registers a rule that is written in terms of Parts, by other rules."""

    def register(function: AnyRule) -> AnyRule:
        for which in functions:
            for torch_function in _functions(which):
                part.COMPOSED[torch_function] = function
        return function

    return register
