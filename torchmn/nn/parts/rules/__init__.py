"""What each torch function means for parts of tensors: one family of functions, one file.

A rule computes this rank's part of the result such that all parts together are the serial result. A function
without a rule is refused by name where an image is cut; where only a vector is, it gets the whole vector.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from torchmn.nn.parts import part
from torchmn.nn.parts.moving import whole
from torchmn.nn.parts.part import Part
from torchmn.nn.parts.refusals import refuse
from torchmn.nn.parts.rules import (  # noqa: F401  (importing a family registers its rules)
    adaptive,
    convolution,
    dropout,
    joining,
    metadata,
    normalization,
    padding,
    pointwise,
    pooling,
    reductions,
    reshaping,
    upsampling,
    vectors,
)


def _without_rule(func: Any, args: tuple, kwargs: dict) -> Any:
    parts = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Part)]
    if any(x.layout_.is_tile for x in parts):
        name = getattr(func, "__name__", None) or str(func)
        refuse(
            f"torch function {name!r} has no rule for images that are cut over ranks {parts[0].layout_}. "
            "Write the layer with supported functions, derive it from torchmn.nn.HaloLayer, or use mode='datapar' or "
            "'modelpar'."
        )
    args, kwargs = pytree.tree_map_only(Part, whole, (args, kwargs))
    return func(*args, **kwargs)


part.without_rule = _without_rule
