"""ShardedTensor: this rank's shard of a global tensor, with which unmodified models compute."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchmn._torch_compat import DisableTorchFunctionSubclass
from torchmn.sharded.combined_dims import COMBINING, check_samples, combined_dims, is_total
from torchmn.sharded.registry import COMPOSED, FALLBACK, RENAMED_KEYWORDS, RULES, name_of, normalize_arguments
from torchmn.sharded.sharding import Sharding
from torchmn.trees import leaves_of


class ShardedTensor(Tensor):
    """A tensor with the global shape, whose values are this rank's shard.

    Every torch function that is called with a ShardedTensor is looked up in `registry.RULES`. Its rule computes this
    rank's shard of the result, with communication where needed, so that the shards of all ranks together are the
    result of the function on the global tensor. A function without a rule raises an error that names it, or, if only
    vectors are cut, computes with the gathered vectors.

    Attributes:
        spec: how the global tensor is cut. (`Tensor.layout` means strided or sparse.)
        extra: data of an optional pass, such as the halo around the tile; None on results of rules.
    """

    spec: Sharding
    extra: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in COMBINING:
            _check_samples(func, args, kwargs or {})
        rule = RULES.get(func)
        if kwargs and not (args and RENAMED_KEYWORDS.isdisjoint(kwargs)):
            args, kwargs = normalize_arguments(func, args, kwargs)
        if rule is None:
            composed, kwargs = COMPOSED.get(func), kwargs or {}
            return composed(*args, **kwargs) if composed else COMPOSED[FALLBACK](func, args, kwargs)
        with DisableTorchFunctionSubclass():
            return rule(*args, **kwargs) if kwargs else rule(*args)

    def __deepcopy__(self, memo: Any) -> ShardedTensor:
        return wrap(local(self).detach().clone(), self.spec)


def wrap(x: Tensor, layout: Sharding) -> ShardedTensor:
    """Returns the plain tensor `x` as this rank's shard of a global tensor with this sharding. Shares its memory."""
    with DisableTorchFunctionSubclass():
        shard = x.as_subclass(ShardedTensor)
    shard.spec = layout
    return shard


def local(x: Tensor) -> Tensor:
    """Returns this rank's shard as a plain tensor, with the shape of the shard."""
    with DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _check_samples(func: Any, args: tuple, kwargs: dict) -> None:
    """Refuses a function that combines elements of the batch dim, if ranks along `data` have other samples.

    A sum or mean of everything is allowed: as a loss, it is this rank's part.
    """
    first = args[0] if args and isinstance(args[0], ShardedTensor) else leaves_of(ShardedTensor, (args, kwargs))[0]
    spec = first.spec
    if spec.grid.sizes["data"] > 1:
        name, count = name_of(func), len(spec.shape)
        dims = combined_dims(name, count, args[1:], kwargs)
        if not is_total(name, dims, count):
            check_samples(spec, dims, name)
