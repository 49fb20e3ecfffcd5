"""Payloads: nested tuples, lists and dicts of tensors, flattened into tensors and a structure, and restored."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.communicators.arguments import describe
from torchmn.errors import GraphError

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


class SequenceNode(NamedTuple):
    """The structure of a tuple, a list or a namedtuple."""

    type: Callable[..., Any]
    items: tuple[Any, ...]


class MappingNode(NamedTuple):
    """The structure of a dict."""

    type: Callable[..., Any]
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


class ConstantNode(NamedTuple):
    """A value that is sent with the structure: None, a number, a string."""

    value: Any


TENSOR = "tensor"  # the structure of a tensor


def flatten(payload: Any, where: str = "the result", keep_objects: bool = False) -> tuple[list[Tensor], Any]:
    """Returns the tensors of `payload` in order, and its structure.

    Args:
        payload: nested tuples, lists and dicts of tensors and constants.
        where: what it is, for error messages.
        keep_objects: treat other objects as constants, for structures that stay in this process.

    Raises:
        GraphError: for an object that is neither tensor, container nor constant, with its path in `payload`.
    """
    tensors: list[Tensor] = []

    def structure_of(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return TENSOR
        if isinstance(value, tuple) and type(value) is not torch.Size:
            kind = type(value) if hasattr(value, "_fields") else tuple
            return SequenceNode(kind, tuple(structure_of(x, f"{where}[{n}]") for n, x in enumerate(value)))
        if type(value) is list:
            return SequenceNode(list, tuple(structure_of(x, f"{where}[{n}]") for n, x in enumerate(value)))
        if type(value) in (dict, OrderedDict):
            items = tuple(structure_of(value[key], f"{where}[{key!r}]") for key in value)
            return MappingNode(type(value), tuple(value), items)
        if keep_objects or isinstance(value, _CONSTANTS):
            return ConstantNode(value)
        raise GraphError(
            f"{where}: expected tensors in any nesting of tuples, lists and dicts, got {describe(value)}: "
            "turn it into tensors, or keep it on its rank (an edge within a rank passes any object)"
        )

    return tensors, structure_of(payload, where)


def restore(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns the payload of `structure`, with the next of `tensors` for each tensor in it."""
    if structure is TENSOR or structure == TENSOR:
        return next(tensors)
    if isinstance(structure, ConstantNode):
        return structure.value
    items = [restore(item, tensors) for item in structure.items]
    if isinstance(structure, MappingNode):
        return structure.type(zip(structure.keys, items, strict=True))
    # The constructor of a namedtuple takes fields as arguments, that of a tuple or list a sequence.
    return structure.type(items) if structure.type in (tuple, list) else structure.type(*items)


class Heading(NamedTuple):
    """The structure of a payload, and the number of rows of its micro-batch."""

    structure: Any = TENSOR
    rows: int | None = None  # None without micro-batches, or if unknown

    def encode(self) -> bytes:
        return pickle.dumps(tuple(self), protocol=pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def decode(data: bytes) -> Heading:
        return Heading(*pickle.loads(data))
