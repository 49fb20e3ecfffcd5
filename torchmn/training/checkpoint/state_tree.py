"""State as JSON and tensors: what `state_dict` returns, taken apart and put together again. Nothing is pickled.

None, bool, int, str, finite floats, lists and dicts with string keys are their own JSON. Everything else is an object
with one key that starts with "!", e.g. {"!tuple": [0.9, 0.999]} or {"!tensor": "model/0.weight", ...}.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
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
    """A part of the state that has no place in JSON or in a tensor; the message names its path."""


class Flattener:
    """Takes states apart; `tensors` collects theirs by path, contiguous and on the host."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        # The tensors stay alive here, or another one could come to lie in the same memory.
        self._same_memory: dict[tuple, tuple[dict, Tensor]] = {}
        self._inside: set[int] = set()

    def flatten(self, x: Any, path: str) -> Any:
        """`x` as JSON."""
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
        if kind in (np.ndarray, np.memmap) or isinstance(x, np.generic):  # other arrays are more than their values
            return self._array(x, path)
        if kind not in (list, tuple, torch.Size) and kind not in _MAPPING_TAGS:
            raise Unstorable(f"{path}: expected {_STORABLE}, got a {kind.__module__}.{kind.__qualname__}")
        if id(x) in self._inside:
            raise Unstorable(f"{path}: the {kind.__name__} contains itself")
        self._inside.add(id(x))
        result = self._mapping(x, path) if kind in _MAPPING_TAGS else self._sequence(x, path)
        self._inside.remove(id(x))
        return result

    def _sequence(self, x: list | tuple, path: str) -> Any:
        items = [self.flatten(item, f"{path}/{place}") for place, item in enumerate(x)]
        return items if type(x) is list else {"!size" if type(x) is torch.Size else "!tuple": items}

    def _mapping(self, x: dict, path: str) -> Any:
        for key in x:
            if type(key) not in _KEYS:
                raise Unstorable(f"{path}: expected keys that are strings, numbers or tuples, got {key!r}")
        if type(x) is dict and all(type(key) is str and not key.startswith("!") for key in x):
            return {key: self.flatten(value, f"{path}/{key}") for key, value in x.items()}
        pairs = [[self.flatten(key, path), self.flatten(value, f"{path}/{key}")] for key, value in x.items()]
        result: dict[str, Any] = {_MAPPING_TAGS[type(x)]: pairs}
        # A module's state_dict carries the versions of its classes in this attribute.
        metadata = metadata_of(x)
        if isinstance(metadata, dict):
            result["metadata"] = self.flatten(dict(metadata), f"{path}/_metadata")
        return result

    def _array(self, x: np.ndarray | np.generic, path: str) -> Any:
        try:
            whole = torch.from_numpy(np.array(x, order="C"))
        except (TypeError, ValueError):
            raise Unstorable(f"{path}: expected {_STORABLE}, got a NumPy array of {x.dtype}") from None
        return {"!numpy": self._tensor(whole, path), "scalar": isinstance(x, np.generic)}

    def _tensor(self, x: Tensor, path: str) -> Any:
        problem = tensor_problem(x)
        if problem:
            raise Unstorable(f"{path}: {problem}")
        x = x.detach()
        # Tied weights, for one, are stored once, and are one tensor again when they come back.
        memory = (x.device, x.data_ptr(), x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
        if x.numel() and memory in self._same_memory:
            return self._same_memory[memory][0]
        path = self._unused(path)
        spec: dict[str, Any] = {"!tensor": path, "dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
        layout = torch.empty_like(x, device="meta").stride()  # of the memory, without gaps and overlaps
        host = x.cpu().resolve_conj().resolve_neg().contiguous()
        if layout != host.stride():
            spec["stride"] = list(layout)
        self.tensors[path] = host
        self._same_memory[memory] = spec, x
        return spec

    def _unused(self, path: str) -> str:
        """`path`, or one like it: the keys 0 and "0" must not meet."""
        result, count = path, 1
        while result in self.tensors:
            count += 1
            result = f"{path}#{count}"
        return result


def tensor_problem(x: Tensor) -> str | None:
    """Why the values of `x` can not be stored, or None."""
    if is_lazy(x):
        return "expected an initialised tensor, got a lazy one: run one forward pass first"
    if type(x) not in (Tensor, nn.Parameter):
        return f"expected a plain tensor, got a {type(x).__module__}.{type(x).__qualname__}"
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        return f"expected a dense tensor with values, got one with layout {x.layout}, dtype {x.dtype} on {x.device}"
    return None


def specs(tree: Any) -> Iterator[dict[str, Any]]:
    """The tensors of a tree: {"!tensor": path, "dtype": ..., "shape": ...}."""
    if isinstance(tree, dict):
        if "!tensor" in tree:
            yield tree
        else:
            for value in tree.values():
                yield from specs(value)
    elif isinstance(tree, list):
        for item in tree:
            yield from specs(item)


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `Flattener.flatten` took apart, with the tensors of `tensors`."""
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
