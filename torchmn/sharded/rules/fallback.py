"""The rule for torch functions that have no other rule: an error, or a computation with gathered vectors."""

from __future__ import annotations

from typing import Any

from torchmn._torch_compat import OpOverload
from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import FALLBACK, composed, name_of
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of, map_only


@composed(FALLBACK)
def compute_without_rule(func: Any, args: tuple, kwargs: dict) -> Any:
    """Returns the function of gathered vectors.

    Raises:
        ParallelizeError: with the name of the function, if an image is cut, or if the function changes a vector.
    """
    sharded = leaves_of(ShardedTensor, (args, kwargs))
    if any(x.spec.is_tile for x in sharded):
        refuse(
            f"torch function {name_of(func)!r} has no rule for images that are cut over ranks {sharded[0].spec}. "
            "Write the layer with supported functions, derive it from torchmn.nn.HaloLayer, or use mode='datapar' or "
            "'modelpar'."
        )
    if isinstance(func, OpOverload):  # torch.vmap calls these, and its backward would not communicate
        refuse(
            f"torch function {name_of(func)!r}, as torch.func and torch.vmap call it, is not supported on vectors that "
            f"are cut over ranks {sharded[0].spec}. Compute outside of vmap"
        )
    if _changes_its_argument(func):
        refuse(
            f"torch function {name_of(func)!r} changes a vector that is cut over ranks {sharded[0].spec}, which is not "
            "supported. Compute a new tensor instead"
        )
    args, kwargs = map_only(ShardedTensor, whole, (args, kwargs))
    return func(*args, **kwargs)


def _changes_its_argument(func: Any) -> bool:
    name = name_of(func)
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
