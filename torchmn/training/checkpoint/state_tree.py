"""Converts state dicts to JSON trees and tensors, and back, without pickling.

None, bool, int, str, finite floats, lists and dicts with string keys are stored as JSON. Other values are JSON objects
whose first key starts with "!", such as {"!tuple": [0.9, 0.999]} or {"!tensor": "model/0.weight"}. In format 1 of
checkpoints, the latter contain dtype and shape, too.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchmn._torch_compat import metadata_of, set_metadata

_MAPPINGS: dict[str, type] = {"!dict": dict, "!ordered": OrderedDict, "!counter": Counter}
_MAPPING_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}
_KEYS = (str, int, bool, float, type(None), tuple)
_STORABLE = "tensors, numbers, strings, bytes, None, lists, tuples, dicts and NumPy arrays"


class Unstorable(ValueError):
    """A value in a state dict that cannot be stored as JSON or as a tensor; the message names its path."""


class Flattener:
    """Converts states to JSON trees.

    Attributes:
        tensors: those of all states by path, without copies. Kept alive, so that their memory is not reused.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._by_memory: dict[int, str] = {}
        self._containers: set[int] = set()  # ids of those around the current value

    def flatten(self, x: Any, path: str) -> Any:
        """Returns `x` as a JSON tree; raises `Unstorable`."""
        kind = type(x)
        if x is None or kind is bool or kind is str:
            return x
        if kind is int:
            return x if -(2**63) <= x < 2**63 else {"!int": hex(x)}
        if kind is float:
            return x if math.isfinite(x) else {"!float": repr(x)}
        if kind is complex:
            return {"!complex": [self.flatten(x.real, path), self.flatten(x.imag, path)]}
        if kind is bytes:
            return {"!bytes": base64.b64encode(x).decode()}
        if isinstance(x, Tensor):
            return self._tensor(x, path)
        if kind in (np.ndarray, np.memmap) or isinstance(x, np.generic):  # subclasses may have more than values
            return self._array(x, path)
        if kind not in (list, tuple, torch.Size) and kind not in _MAPPING_TAGS:
            raise Unstorable(f"{path}: expected {_STORABLE}, got a {kind.__module__}.{kind.__qualname__}")
        if id(x) in self._containers:
            raise Unstorable(f"{path}: the {kind.__name__} contains itself")
        self._containers.add(id(x))
        result = self._mapping(x, path) if kind in _MAPPING_TAGS else self._sequence(x, path)
        self._containers.remove(id(x))
        return result

    def _sequence(self, x: list | tuple, path: str) -> Any:
        items = [self.flatten(item, f"{path}/{number}") for number, item in enumerate(x)]
        return items if type(x) is list else {"!size" if type(x) is torch.Size else "!tuple": items}

    def _mapping(self, x: dict, path: str) -> Any:
        for key in x:
            if type(key) not in _KEYS:
                raise Unstorable(f"{path}: expected keys that are strings, numbers or tuples, got {key!r}")
        if type(x) is dict and all(type(key) is str and not key.startswith("!") for key in x):
            return {key: self.flatten(value, f"{path}/{key}") for key, value in x.items()}
        pairs = [[self.flatten(key, path), self.flatten(value, f"{path}/{key}")] for key, value in x.items()]
        result: dict[str, Any] = {_MAPPING_TAGS[type(x)]: pairs}
        # The versions of a module's classes, which torch keeps in an attribute of the state dict.
        metadata = metadata_of(x)
        if isinstance(metadata, dict):
            result["metadata"] = self.flatten(dict(metadata), f"{path}/_metadata")
        return result

    def _array(self, x: np.ndarray | np.generic, path: str) -> Any:
        try:
            values = torch.from_numpy(np.array(x, order="C"))
        except (TypeError, ValueError):
            raise Unstorable(f"{path}: expected {_STORABLE}, got a NumPy array of {x.dtype}") from None
        return {"!numpy": self._tensor(values, path), "scalar": isinstance(x, np.generic)}

    def _tensor(self, x: Tensor, path: str) -> Any:
        problem = tensor_problem(x)
        if problem:
            raise Unstorable(f"{path}: {problem}")
        # Tensors that share memory, such as tied weights, are stored once, and loaded as one tensor.
        memory = hash(_memory_of(x))
        shared = self._by_memory.get(memory)
        if shared is None or _memory_of(self.tensors[shared]) != _memory_of(x):
            shared = self._unused(path)
            self.tensors[shared] = x
            if x.numel():
                self._by_memory[memory] = shared
        spec: dict[str, Any] = {"!tensor": shared}
        if not x.is_contiguous():
            layout = torch.empty_like(x, device="meta")  # dense: without gaps and overlaps
            if not layout.is_contiguous():
                spec["stride"] = list(layout.stride())
        return spec

    def _unused(self, path: str) -> str:
        """Returns `path`, with a suffix if it is taken: the keys 0 and "0" of a dict have the same path."""
        result, count = path, 1
        while result in self.tensors:
            count += 1
            result = f"{path}#{count}"
        return result


def _memory_of(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.device, x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg()


def tensor_problem(x: Tensor) -> str | None:
    """Returns why the values of `x` cannot be stored, or None."""
    if is_lazy(x):
        return "expected an initialised tensor, got a lazy one: run one forward pass first"
    if type(x) not in (Tensor, nn.Parameter):
        return f"expected a plain tensor, got a {type(x).__module__}.{type(x).__qualname__}"
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        return f"expected a dense tensor with values, got one with layout {x.layout}, dtype {x.dtype} on {x.device}"
    return None


def specs(tree: Any) -> list[dict[str, Any]]:
    """Returns the objects of a tree that stand for tensors: {"!tensor": path}, with "stride" if not contiguous."""
    found: list[dict[str, Any]] = []
    remaining = [tree]
    while remaining:
        current = remaining.pop()
        if isinstance(current, dict):
            if "!tensor" in current:
                found.append(current)
            else:
                remaining.extend(reversed(current.values()))
        elif isinstance(current, list):
            remaining.extend(reversed(current))
    return found


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns the state that `Flattener.flatten` converted, with the tensors by path."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("!"):
        return {key: unflatten(value, tensors) for key, value in tree.items()}
    value = tree[tag]
    if tag in _MAPPINGS:
        result = _MAPPINGS[tag]({unflatten(key, tensors): unflatten(item, tensors) for key, item in value})
        if "metadata" in tree:
            set_metadata(result, OrderedDict(unflatten(tree["metadata"], tensors)))
        return result
    if tag == "!tensor":
        return tensors[value]
    if tag == "!numpy":
        array = tensors[value["!tensor"]].numpy()
        return array[()] if tree["scalar"] else array
    if tag in ("!tuple", "!size"):
        return (tuple if tag == "!tuple" else torch.Size)(unflatten(value, tensors))
    if tag == "!complex":
        return complex(*unflatten(value, tensors))
    return {"!int": lambda x: int(x, 16), "!float": float, "!bytes": base64.b64decode}[tag](value)
