"""Encodes plain values (numbers, texts, dtypes, and containers of them) as bytes, for comparisons between ranks.

JSON instead of pickle: ranks decode data of peers that are not verified yet, and unpickling could run code of theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch


def encode(value: Any, other: Callable[[Any], Any] | None = None) -> bytes:
    """Returns `value` as bytes.

    Args:
        value: None, a bool, int, float, str or torch.dtype, or lists, tuples and dicts of these.
        other: returns a plain value to encode instead of a value of another type.

    Raises:
        TypeError: for a value of another type, without `other`.
    """
    return json.dumps(_tagged(value, other), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Returns the value that was encoded; a NamedTuple becomes a tuple."""
    return _untagged(json.loads(data))


def _tagged(value: Any, other: Callable[[Any], Any] | None) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_tagged(item, other) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_tagged(item, other) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_tagged(key, other), _tagged(item, other)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if other is None:
        raise TypeError(f"expected a plain value, got {type(value).__name__}: {value!r}")
    return _tagged(other(value), None)


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "dtype":
        return getattr(torch, content)
    items = [_untagged(item) for item in content]
    return tuple(items) if tag == "tuple" else dict(items)
