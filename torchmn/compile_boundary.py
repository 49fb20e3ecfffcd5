"""Decorators for functions that torch.compile must not trace: communication, and forwards of sharded tensors.

They may also be called as other libraries spell them (other_spellings.py): both need a function around the operation,
and one costs less than two.

torch.compile would trace calls into this package, down to locks, byte buffers and the watchdog. At best that takes a
minute and gains nothing; at worst an operation fails on one rank while the others wait in it. So a compiled program has
a graph break at each of these functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from torchmn._torch_compat import compiler_here, disable_dynamo
from torchmn.other_spellings import ForeignMessage, respelled

OPERATIONS = (
    "send recv barrier bcast gather allgather scatter alltoall allreduce reduce_scatter split bcast_data "
    "multi_node_mean_grad send_obj recv_obj bcast_obj gather_obj allgather_obj scatter_obj allreduce_obj"
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Class = TypeVar("Class", bound=type)


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns `function` such that torch.compile traces neither it nor the functions that it calls."""
    untraced = disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling() or compiler_here() is not None:
            return untraced(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except (TypeError, ForeignMessage) as error:
            other = respelled(function, args, kwargs, error)
            if other is None:
                raise
        result = run(*other.args, **other.kwargs)
        return result if other.finish is None else other.finish(result)

    return run


def uncompiled_methods(names: str) -> Callable[[Class], Class]:
    """Returns a class decorator that applies `uncompiled` to the methods of these names, separated by spaces."""

    def decorate(kind: Class) -> Class:
        for name in names.split():
            setattr(kind, name, uncompiled(getattr(kind, name)))
        return kind

    return decorate
