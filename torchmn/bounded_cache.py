"""Caches that are bounded by what they hold, and not by how many entries: entries may be of any size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")


class BoundedCache(Generic[Value]):
    """A dict that forgets everything when it would hold more than `most`; one entry alone may be larger.

    It may be used by several threads: `held` is then right to an entry or two.
    """

    def __init__(self, most: int):
        self.most = most
        self.held = 0
        self._values: dict[Any, Value] = {}
        self.get = self._values.get

    def __len__(self) -> int:
        return len(self._values)

    def keep(self, key: Hashable, value: Value, size: int) -> None:
        """Remember a value, whose key and value together are of this size."""
        if self.held + size > self.most:
            self._values.clear()
            self.held = 0
        self._values[key] = value
        self.held += size


def remembered_tensors(most_bytes: int) -> Callable[[Callable[Arguments, Tensor]], Callable[Arguments, Tensor]]:
    """Like `functools.lru_cache`, for a function of positional arguments that returns a tensor."""

    def decorate(function: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
        cache: BoundedCache[Tensor] = BoundedCache(most_bytes)

        @functools.wraps(function)
        def remembered(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Tensor:
            assert not kwargs
            known = cache.get(args)
            if known is None:
                known = function(*args, **kwargs)
                cache.keep(args, known, known.nbytes + 1000)  # a tensor costs some memory besides its elements
            return known

        remembered.cache = cache  # type: ignore[attr-defined]
        return remembered

    return decorate
