"""The table of rules: which function computes a torch function on sharded tensors."""

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

# torch function -> rule, filled by the files in `rules`. Inside a rule of RULES, torch functions on a ShardedTensor
# compute on the shard; inside a rule of COMPOSED they look up rules again.
RULES: dict[Any, Rule] = {}
COMPOSED: dict[Any, Rule] = {}
FALLBACK = "no rule"  # key of the rule for all other torch functions; it gets the function, args and kwargs

_NAMESPACES = (torch, F, Tensor, NN_FUNCTIONS, torch.special)
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input"}
RENAMED_KEYWORDS = {*_ALIASES, "out"}
"""Keywords that `normalize_arguments` changes."""


def rule(*functions: str | Rule) -> Callable[[AnyRule], AnyRule]:
    """Registers a rule that computes with shards.

    Args:
        functions: torch functions, or names that stand for every torch function of that name.
    """
    return _registering(RULES, functions)


def composed(*functions: str | Rule) -> Callable[[AnyRule], AnyRule]:
    """Registers a rule that is composed of other torch functions of sharded tensors. Arguments as for `rule`."""
    return _registering(COMPOSED, functions)


def wrap_rule(*functions: str | Rule) -> Callable[[AnyRule], AnyRule]:
    """Registers a wrapper around the rules of these torch functions, for optional passes.

    The wrapper is called with the torch function, its rule and the arguments.
    """

    def register(wrapper: AnyRule) -> AnyRule:
        for function in _all_named(functions):
            RULES[function] = _WrappedRule(wrapper, function, RULES[function])
        return wrapper

    return register


class _WrappedRule(partial):
    """A wrapper, with the torch function and the rule that it wraps."""


def rule_of(function: Any) -> Rule | None:
    """Returns the rule of a torch function, without wrappers; None if it has none."""
    rule = RULES.get(function)
    while isinstance(rule, _WrappedRule):
        rule = rule.args[-1]
    return rule


def _registering(rules: dict[Any, Rule], functions: tuple[str | Rule, ...]) -> Callable[[AnyRule], AnyRule]:
    def register(function: AnyRule) -> AnyRule:
        rules.update(dict.fromkeys(_all_named(functions), function))
        return function

    return register


def _all_named(functions: tuple[str | Rule, ...]) -> list[Any]:
    if FALLBACK in functions:
        return [FALLBACK]
    return [each for which in functions for each in (functions_named(which) if isinstance(which, str) else [which])]


def functions_named(name: str) -> list[Any]:
    """Returns every torch function of that name, such as torch.relu, F.relu and Tensor.relu."""
    found = [getattr(namespace, name) for namespace in _NAMESPACES if hasattr(namespace, name)]
    return [getattr(f, "__get__", f) if not callable(f) else f for f in found]


def names(text: str) -> list[str]:
    """Returns the names in a text, which are separated by spaces."""
    return text.split()


def normalize_arguments(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Returns the arguments as rules expect them: torch's keywords, the input as a positional one."""
    if func not in RULES and func not in COMPOSED:
        return args, kwargs
    kwargs = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
    if kwargs.pop("out", None) is not None:
        refuse(f"out= of {name_of(func)!r} is not supported for sharded tensors")
    if not args and "input" in kwargs and func is not torch.where:
        args = (kwargs.pop("input"),)
    return args, kwargs


def name_of(func: Any) -> str:
    """Returns the name of a torch function."""
    return getattr(func, "__name__", None) or str(func)
