"""What happens to a torch function that has no rule for sharded tensors."""

from __future__ import annotations

from typing import Any

from torchmn._torch_compat import OpOverload
from torchmn.sharded.redistribute import whole
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import OTHERWISE, composed, name_of
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of, map_only


@composed(OTHERWISE)
def without_rule(func: Any, args: tuple, kwargs: dict) -> Any:
    """Refuses the function by name where an image is sharded; computes it on whole vectors where only these are."""
    parts = leaves_of(ShardedTensor, (args, kwargs))
    if any(x.spec.is_tile for x in parts):
        refuse(
            f"torch function {name_of(func)!r} has no rule for images that are cut over ranks {parts[0].spec}. "
            "Write the layer with supported functions, derive it from torchmn.nn.HaloLayer, or use mode='datapar' or "
            "'modelpar'."
        )
    if isinstance(func, OpOverload):  # so torch.vmap calls, and knows nothing of other ranks in backward
        refuse(
            f"torch function {name_of(func)!r}, as torch.func and torch.vmap call it, is not supported on vectors that "
            f"are cut over ranks {parts[0].spec}. Compute outside of vmap"
        )
    if _changes_its_argument(func):
        refuse(
            f"torch function {name_of(func)!r} changes a vector that is cut over ranks {parts[0].spec}, which is not "
            "supported. Make a new one instead"
        )
    args, kwargs = map_only(ShardedTensor, whole, (args, kwargs))
    return func(*args, **kwargs)


def _changes_its_argument(func: Any) -> bool:
    name = name_of(func)
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
