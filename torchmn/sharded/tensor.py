"""ShardedTensor: this rank's part of a global tensor, which ordinary models can compute with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchmn._torch_compat import DisableTorchFunctionSubclass
from torchmn.sharded.registry import CHANGED_WORDS, COMPOSED, OTHERWISE, RULES, spelled_alike
from torchmn.sharded.sharding import Sharding


class ShardedTensor(Tensor):
    """A tensor whose shape is the global one and whose values are this rank's part of it.

    Every torch function that gets a ShardedTensor is looked up in RULES: a rule computes this rank's part of the
    result, communicating where it must, so that all parts together are what the function gives on the global tensor.
    A function without a rule is refused by name; nothing is ever computed on a part as if it were the whole.
    """

    spec: Sharding  # with underscore: `layout` is torch's word for strided or sparse
    extra: Any = None  # of a pass; results of rules have none

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        rule = RULES.get(func)
        if kwargs and not (args and CHANGED_WORDS.isdisjoint(kwargs)):
            args, kwargs = spelled_alike(func, args, kwargs)
        if rule is None:
            composed, kwargs = COMPOSED.get(func), kwargs or {}
            return composed(*args, **kwargs) if composed else COMPOSED[OTHERWISE](func, args, kwargs)
        with DisableTorchFunctionSubclass():
            return rule(*args, **kwargs) if kwargs else rule(*args)

    def __deepcopy__(self, memo: Any) -> ShardedTensor:
        return wrap(local(self).detach().clone(), self.spec)


def wrap(x: Tensor, layout: Sharding) -> ShardedTensor:
    """The plain tensor `x`, as this rank's part of a tensor with `layout`."""
    with DisableTorchFunctionSubclass():
        part: ShardedTensor = x.as_subclass(ShardedTensor)  # type: ignore[assignment]
    part.spec = layout
    return part


def local(x: Tensor) -> Tensor:
    """The plain tensor that a ShardedTensor holds; its shape is that of the part."""
    with DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)
