"""Finding and replacing leaves of nested tuples, lists and dicts, such as the arguments of a call."""

from __future__ import annotations

from typing import Any, TypeVar

from torchmn._torch_compat import tree_leaves as leaves
from torchmn._torch_compat import tree_map_only as map_only

__all__ = ["leaves", "leaves_of", "map_only"]

T = TypeVar("T")


def leaves_of(kind: type[T], tree: Any) -> list[T]:
    """Returns the leaves of `tree` that are instances of `kind`, in order."""
    return [x for x in leaves(tree) if isinstance(x, kind)]
