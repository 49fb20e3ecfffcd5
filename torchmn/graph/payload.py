"""Payloads: nested tuples, lists and dicts of tensors, taken apart for the way and put together again."""

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


class Sequence(NamedTuple):
    """The place of a tuple, a list or a namedtuple, and of what it holds."""

    type: Callable[..., Any]
    items: tuple[Any, ...]


class Mapping(NamedTuple):
    """The place of a dict, and of what it holds."""

    type: Callable[..., Any]
    keys: tuple[Any, ...]
    items: tuple[Any, ...]


class Constant(NamedTuple):
    """A value that travels with the structure: None, a number, a string."""

    value: Any


TENSOR = "tensor"  # the structure of a payload that is one tensor, and the place of a tensor in any other


def flatten(payload: Any, where: str = "the result", keep_objects: bool = False) -> tuple[list[Tensor], Any]:
    """The tensors of `payload` in order, and the structure that holds their places.

    An object that is neither a tensor, nor a container, nor a plain constant raises GraphError, naming its place in
    `payload`; with `keep_objects`, for structures that stay in this process, it is a constant too.
    """
    tensors: list[Tensor] = []

    def take_apart(value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return TENSOR
        if isinstance(value, tuple) and type(value) is not torch.Size:
            kind = type(value) if hasattr(value, "_fields") else tuple
            return Sequence(kind, tuple(take_apart(x, f"{where}[{n}]") for n, x in enumerate(value)))
        if type(value) is list:
            return Sequence(list, tuple(take_apart(x, f"{where}[{n}]") for n, x in enumerate(value)))
        if type(value) in (dict, OrderedDict):
            items = tuple(take_apart(value[key], f"{where}[{key!r}]") for key in value)
            return Mapping(type(value), tuple(value), items)
        if keep_objects or isinstance(value, _CONSTANTS):
            return Constant(value)
        raise GraphError(_can_not_travel(value, where))

    return tensors, take_apart(payload, where)


def _can_not_travel(value: Any, where: str) -> str:
    return (
        f"{where}: expected tensors in any nesting of tuples, lists and dicts, got {describe(value)}: "
        "turn it into tensors, or keep it on its rank (an own-rank edge carries any object)"
    )


def restore(structure: Any, tensors: Iterator[Tensor]) -> Any:
    """The payload of `structure`, with the next of `tensors` in each place."""
    if structure is TENSOR or structure == TENSOR:
        return next(tensors)
    if isinstance(structure, Constant):
        return structure.value
    items = [restore(item, tensors) for item in structure.items]
    if isinstance(structure, Mapping):
        return structure.type(zip(structure.keys, items, strict=True))
    # A namedtuple takes its fields one by one, a tuple or list takes them together.
    return structure.type(items) if structure.type in (tuple, list) else structure.type(*items)


class Heading(NamedTuple):
    """What the receiver of a payload must know beside its tensors."""

    structure: Any = TENSOR
    rows: int | None = None  # of the micro-batch, if there are micro-batches and somebody on the way knows

    def encode(self) -> bytes:
        return pickle.dumps(tuple(self), protocol=pickle.HIGHEST_PROTOCOL)

    @staticmethod
    def decode(data: bytes) -> Heading:
        return Heading(*pickle.loads(data))
