"""Digests of data set items by content: equal items have equal digests in all processes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import PurePath
from typing import Any

import numpy as np
from torch import Tensor

from torchmn.communicators.messages import wire
from torchmn.communicators.messages.digest import digest_of

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
PLAIN = (*_SCALARS, PurePath)


def digest(item: Any) -> str:
    """Returns a short text that is equal on ranks whose items have equal types and values.

    Tensors, arrays and PIL images are compared by dtype, shape and bytes; dicts and sets regardless of their order,
    which may differ between processes; other objects by what pickle saves of them. Objects that cannot be pickled (a
    function, an open file) are compared by type only.
    """
    try:
        return _of(item, ())
    except Exception:  # attributes may run user code that raises; a structure may be too deep
        return _hashed("opaque", _name(type(item)))


def _of(x: Any, above: tuple[int, ...]) -> str:
    """Returns the digest of `x`; `above` has the ids of the objects that contain it, to end cycles."""
    if isinstance(x, _SCALARS):
        return _hashed(_name(type(x)), repr(x))
    if isinstance(x, PurePath):
        return _hashed("path", str(x))
    if isinstance(x, Tensor):
        return _of_tensor(x)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind != "O":
        return _hashed("array", f"{x.dtype.str} {x.shape}", x.tobytes())
    if isinstance(x, bytearray | memoryview):
        return _hashed(_name(type(x)), "", bytes(x))
    if isinstance(x, type) or not hasattr(x, "__reduce_ex__"):
        return _hashed("opaque", _name(x if isinstance(x, type) else type(x)))
    if id(x) in above:
        return _hashed("itself", str(len(above) - above.index(id(x))))
    inside = (*above, id(x))
    if isinstance(x, Mapping):
        return _hashed("mapping", *sorted(_of(key, inside) + _of(value, inside) for key, value in x.items()))
    if isinstance(x, Set):
        return _hashed("set", *sorted(_of(member, inside) for member in x))
    if isinstance(x, list | tuple) or (isinstance(x, np.ndarray) and x.ndim > 0):
        return _hashed(_name(type(x)), *(_of(element, inside) for element in x))
    return _of_pil_image(x) or _of_object(x, inside)


def _of_tensor(x: Tensor) -> str:
    kind = f"{x.dtype} {tuple(x.shape)}"
    try:
        plain = x.detach().as_subclass(Tensor).to_dense().resolve_conj().resolve_neg().cpu().contiguous()
        return _hashed("tensor", kind, wire.as_bytes(plain).numpy().tobytes() if plain.numel() else b"")
    except (RuntimeError, TypeError, NotImplementedError):  # quantized, nested or meta
        return _hashed("tensor", kind)


def _of_pil_image(x: Any) -> str | None:
    """Returns the digest of a PIL image, without its file name; None for other objects."""
    if all(hasattr(x, name) for name in ("mode", "size", "tobytes")):
        return _hashed("picture", f"{x.mode} {x.size}", x.tobytes())
    return None


def _of_object(x: Any, inside: tuple[int, ...]) -> str:
    name = _name(type(x))
    try:
        saved = x.__reduce_ex__(2)
    except Exception:  # cannot be pickled
        return _hashed("opaque", name)
    if not isinstance(saved, tuple):  # the name of a function
        return _hashed("named", saved)
    # (function, arguments, state, list items, dict items); the last two are iterators.
    contents = [list(part) if hasattr(part, "__next__") else part for part in saved[1:5]]
    return _hashed(name, *(_of(part, inside) for part in contents))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _hashed(*parts: str | bytes) -> str:
    return digest_of(parts)
