"""Caches whose entries are bounded by their total size instead of their number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


class BoundedCache(Generic[Value]):
    """A dict that is cleared before its total size would exceed `limit`; a single entry may be larger.

    Several threads may use it; `total` and `misses` may then be wrong by an entry or two.

    Attributes:
        limit: the bound.
        total: size of the present entries.
        misses: number of values that were computed and added, also of those that were cleared since.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.total = 0
        self.misses = 0
        self._values: dict[Hashable, Value] = {}
        self.get = self._values.get

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Adds an entry; `size` is that of key and value together."""
        if self.total + size > self.limit:
            self._values.clear()
            self.total = 0
        self._values[key] = value
        self.total += size
        self.misses += 1


class CachedFunction(Generic[Arguments]):
    """A function of positional arguments that returns a tensor, with a cache of its results."""

    def __init__(self, function: Callable[Arguments, Tensor], limit_bytes: int):
        functools.update_wrapper(self, function)
        self._function = function
        self.cache: BoundedCache[Tensor] = BoundedCache(limit_bytes)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensor:
        assert not kwargs
        known = self.cache.get(args)
        if known is None:
            known = self._function(*args, **kwargs)
            self.cache.put(args, known, known.nbytes + 1000)  # a tensor needs some memory besides its elements
        return known


def cached_tensors(limit_bytes: int) -> Callable[[Callable[Arguments, Tensor]], CachedFunction[Arguments]]:
    """Returns a decorator like `functools.lru_cache`, for a function of positional arguments that returns a tensor."""
    return lambda function: CachedFunction(function, limit_bytes)
