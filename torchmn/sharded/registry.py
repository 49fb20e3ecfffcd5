"""Which torch function has which rule for sharded tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmn._torch_compat import NN_FUNCTIONS
from torchmn.sharded.refusals import refuse

Rule = Callable[..., Any]
AnyRule = TypeVar("AnyRule", bound=Rule)

# torch function -> what to do when one of its arguments is a ShardedTensor. Filled by the modules in `rules`.
# A rule of RULES sees sharded tensors as the plain tensors that they hold; one of COMPOSED computes with sharded ones.
RULES: dict[Any, Rule] = {}
COMPOSED: dict[Any, Rule] = {}
OTHERWISE = "no rule"  # the key of what is called, with function, args and kwargs, for a function that has none

_HOMES = (torch, F, Tensor, NN_FUNCTIONS, torch.special)
_SPELLINGS = {"axis": "dim", "keepdims": "keepdim", "self": "input"}
CHANGED_WORDS = {*_SPELLINGS, "out"}
"""Keywords that `spelled_alike` changes."""


def rule(*functions: str | Rule) -> Callable[[AnyRule], AnyRule]:
    """Registers a rule for these torch functions, or for every one of a name.

    In it, sharded tensors compute as plain tensors.
    """
    return _registering(RULES, functions)


def composed(*functions: str | Rule) -> Callable[[AnyRule], AnyRule]:
    """Registers a rule that is written in terms of sharded tensors, by other rules."""
    return _registering(COMPOSED, functions)


def around(*functions: str | Rule) -> Callable[[AnyRule], AnyRule]:
    """Registers a function around the rules of these torch functions.

    It gets the torch function, its rule, then the arguments. For optional layers, of which no rule knows.
    """

    def register(wrapper: AnyRule) -> AnyRule:
        for function in _all_named(functions):
            RULES[function] = _Around(wrapper, function, RULES[function])
        return wrapper

    return register


class _Around(partial):
    """A function around a rule."""


def rule_of(function: Any) -> Rule | None:
    """Returns the rule of a torch function, without what lies around it."""
    rule = RULES.get(function)
    while isinstance(rule, _Around):
        rule = rule.args[-1]
    return rule


def _registering(rules: dict[Any, Rule], functions: tuple[str | Rule, ...]) -> Callable[[AnyRule], AnyRule]:
    def register(function: AnyRule) -> AnyRule:
        rules.update(dict.fromkeys(_all_named(functions), function))
        return function

    return register


def _all_named(functions: tuple[str | Rule, ...]) -> list[Any]:
    if OTHERWISE in functions:
        return [OTHERWISE]
    return [each for which in functions for each in (functions_named(which) if isinstance(which, str) else [which])]


def functions_named(name: str) -> list[Any]:
    """Every function of that name: torch.relu, F.relu, Tensor.relu are one to a user."""
    found = [getattr(home, name) for home in _HOMES if hasattr(home, name)]
    return [getattr(f, "__get__", f) if not callable(f) else f for f in found]


def names(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


def spelled_alike(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments as rules know them: numpy's words are torch's too, and the first may be given by its name."""
    if func not in RULES and func not in COMPOSED:
        return args, kwargs
    kwargs = {_SPELLINGS.get(name, name): value for name, value in kwargs.items()}
    if kwargs.pop("out", None) is not None:
        refuse(f"out= of {name_of(func)!r} is not supported for parts")
    if not args and "input" in kwargs and func is not torch.where:
        args = (kwargs.pop("input"),)
    return args, kwargs


def name_of(func: Any) -> str:
    """What a user calls a torch function."""
    return getattr(func, "__name__", None) or str(func)
