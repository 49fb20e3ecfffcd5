"""NumPy arrays as messages: converted to tensors, and results to arrays, when an operation has refused them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchmn.communicators.messages.wire import ArrayTensor
from torchmn.other_spellings import Respelled, foreign_messages, message_types

_COLLECTIVES = ("bcast", "gather", "scatter", "allgather", "alltoall", "allreduce", "reduce_scatter")
_ONE_PER_RANK = ("scatter", "alltoall", "reduce_scatter")


class _Unsendable:
    """Replaces an array that cannot be a tensor, in the error that all ranks raise."""

    def __init__(self, array: np.ndarray):
        self.dtype = array.dtype

    def __repr__(self) -> str:
        return f"a NumPy array of {self.dtype}"


def _tensor(x: Any, arrives_as_array: bool) -> Any:
    """Returns an array as a tensor with the same memory, where possible; anything else as it is."""
    if not isinstance(x, np.ndarray | np.generic):
        return x
    array = np.asarray(x)
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")
    try:
        tensor = torch.from_numpy(array)
    except (TypeError, ValueError):  # objects, strings, another byte order
        return _Unsendable(array)
    return tensor.as_subclass(ArrayTensor) if arrives_as_array else tensor


def _message(x: Any, operation: str, arrives_as_array: bool) -> Any:
    """Returns an argument of an operation with tensors in place of arrays."""
    if isinstance(x, np.ndarray) and x.ndim and operation in _ONE_PER_RANK:
        x = list(x)
    if isinstance(x, list | tuple):
        return tuple([_tensor(each, arrives_as_array) for each in x])
    return _tensor(x, arrives_as_array)


def _with_tensors(operation: str, at: int, arrives_as_array: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of an operation, whose message is argument `at`, with tensors in place of arrays."""
    changed = list(args)
    changed[at:] = [_message(x, operation, arrives_as_array) for x in args[at:]]
    return tuple(changed), {name: _message(x, operation, arrives_as_array) for name, x in kwargs.items()}


def _array(x: Any) -> Any:
    """Returns a result of an operation with arrays in place of tensors."""
    if isinstance(x, tuple):
        return tuple([_array(each) for each in x])
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else x


def _of_communicator(operation: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Respelled | None]:
    def respell(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Respelled | None:
        comm = args[0]
        if comm.noting.active:  # called by a function of torchmn.functions, which is to convert its arguments
            return None
        given: Any = args[1] if len(args) > 1 else kwargs.get("x")

        def finish(result: Any) -> Any:
            if operation == "bcast" and comm.rank == kwargs.get("root", args[2] if len(args) > 2 else 0):
                return given
            if kwargs.get("in_place"):
                given[...] = _array(result)
                return given
            return _array(result)

        return Respelled(*_with_tensors(operation, 1, True, args, kwargs), finish)

    return respell


def _of_functions(operation: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Respelled]:
    """Functions of torchmn.functions return tensors, as ChainerMN's return variables."""

    def respell(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Respelled:
        if operation in ("send", "connect"):  # not numbered
            return Respelled(*_with_tensors(operation, 0, False, args, kwargs))
        comm = args[0] if args else kwargs["comm"]
        comm.noting.calls -= 1  # of the call that was refused
        return Respelled(*_with_tensors(operation, 1, False, args, kwargs))

    return respell


message_types += [np.ndarray, np.generic]
foreign_messages["connect"] = _of_functions("connect")  # of pseudo_connect
for _name in ("send", *_COLLECTIVES):
    foreign_messages[f"Communicator.{_name}"] = _of_communicator(_name)
    foreign_messages[_name] = _of_functions(_name)
