"""What each torch function means for parts of tensors: one family of functions, one file.

A rule computes this rank's part of the result such that all parts together are the serial result. A function
without a rule is refused by name where an image is cut; where only a vector is, it gets the whole vector.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchmn.nn.parts import part
from torchmn.nn.parts.moving import whole
from torchmn.nn.parts.part import Part
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules import (  # noqa: F401  (importing a family registers its rules)
    adaptive,
    convolution,
    dropout,
    indexing,
    joining,
    metadata,
    normalization,
    padding,
    pointwise,
    pooling,
    reductions,
    reshaping,
    softmax,
    upsampling,
    vectors,
)


def _without_rule(func: Any, args: tuple, kwargs: dict) -> Any:
    parts = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Part)]
    if any(x.layout_.is_tile for x in parts):
        refuse(
            f"torch function {_name(func)!r} has no rule for images that are cut over ranks {parts[0].layout_}. "
            "Write the layer with supported functions, derive it from torchmn.nn.HaloLayer, or use mode='datapar' or "
            "'modelpar'."
        )
    if isinstance(func, torch._ops.OpOverload):  # so torch.vmap calls, and knows nothing of other ranks in backward
        refuse(
            f"torch function {_name(func)!r}, as torch.func and torch.vmap call it, is not supported on vectors that "
            f"are cut over ranks {parts[0].layout_}. Compute outside of vmap"
        )
    if _changes_its_argument(func):
        refuse(
            f"torch function {_name(func)!r} changes a vector that is cut over ranks {parts[0].layout_}, which is not "
            "supported. Make a new one instead"
        )
    args, kwargs = pytree.tree_map_only(Part, whole, (args, kwargs))
    return func(*args, **kwargs)


_SPELLINGS = {"axis": "dim", "keepdims": "keepdim", "self": "input"}
_CHANGED_WORDS = {*_SPELLINGS, "out"}


def _spelled_alike(func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Arguments as rules know them: numpy's words are torch's too, and the first may be given by its name."""
    if args and _CHANGED_WORDS.isdisjoint(kwargs):
        return args, kwargs
    if func not in part.RULES and func not in part.COMPOSED:
        return args, kwargs
    kwargs = {_SPELLINGS.get(name, name): value for name, value in kwargs.items()}
    if kwargs.pop("out", None) is not None:
        refuse(f"out= of {_name(func)!r} is not supported for parts")
    if not args and "input" in kwargs and func is not torch.where:
        args = (kwargs.pop("input"),)
    return args, kwargs


def _name(func: Any) -> str:
    return getattr(func, "__name__", None) or str(func)


def _changes_its_argument(func: Any) -> bool:
    name = _name(func)
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


part.without_rule = _without_rule
part.spelled_alike = _spelled_alike
