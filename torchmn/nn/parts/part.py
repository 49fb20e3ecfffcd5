"""Part: this rank's part of a global tensor, which ordinary models can compute with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmn.nn.parts.layout import Layout

Rule = Callable[..., Any]

# torch function -> what to do when one of its arguments is a Part. Filled by the modules in `rules`.
# A rule of RULES sees parts as the plain tensors that they hold; one of COMPOSED computes with whole Parts.
RULES: dict[Any, Rule] = {}
COMPOSED: dict[Any, Rule] = {}


def spelled_alike(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments as rules know them; replaced by `rules`."""
    return args, kwargs


def without_rule(func: Any, args: tuple, kwargs: dict) -> Any:
    """What happens to a function that has no rule; replaced by `rules`."""
    raise NotImplementedError(func)


class Part(Tensor):
    """A tensor whose shape is the global one and whose values are this rank's part of it.

    Every torch function that meets a Part is looked up in RULES: a rule computes this rank's part of the result,
    communicating where it must, so that all parts together are what the function gives on the global tensor. A
    function without a rule is refused by name; nothing is ever computed on a part as if it were the whole.
    """

    layout_: Layout  # with underscore: `layout` is torch's word for strided or sparse
    wide: Any = None  # a `Wide`: what lies around the tile, where a rule knows it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        rule = RULES.get(func)
        if kwargs:
            args, kwargs = spelled_alike(func, args, kwargs)
        if rule is None:
            composed = COMPOSED.get(func)
            return composed(*args, **(kwargs or {})) if composed else without_rule(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return rule(*args, **kwargs) if kwargs else rule(*args)

    def __deepcopy__(self, memo: Any) -> Part:
        return wrap(local(self).detach().clone(), self.layout_)


def wrap(x: Tensor, layout: Layout) -> Part:
    """The plain tensor `x`, as this rank's part of a tensor with `layout`."""
    with torch._C.DisableTorchFunctionSubclass():
        part: Part = x.as_subclass(Part)  # type: ignore[assignment]
    part.layout_ = layout
    return part


def local(x: Tensor) -> Tensor:
    """The plain tensor that a Part holds; its shape is that of the part."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)
