"""What torch.compile must run as it is: communication, and forwards that compute with parts of tensors.

torch.compile follows calls into this package, and through it into locks, byte buffers and the watchdog. At best that
takes a minute and changes nothing; at worst an operation fails on one rank while the others wait in it. So where a
compiled program calls one of these functions, it leaves the compiled code, and comes back afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from torchmn._torch_compat import compiler_here, disable_dynamo

OPERATIONS = (
    "send recv barrier bcast gather allgather scatter alltoall allreduce reduce_scatter split bcast_data "
    "multi_node_mean_grad send_obj recv_obj bcast_obj gather_obj allgather_obj scatter_obj allreduce_obj"
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Class = TypeVar("Class", bound=type)


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, which a compiled program calls as an uncompiled one does, with all that it calls."""
    as_it_is = disable_dynamo(function)

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling() and compiler_here() is None:
            return function(*args, **kwargs)
        return as_it_is(*args, **kwargs)

    return run


def uncompiled_methods(names: str) -> Callable[[Class], Class]:
    """Makes these methods of a class uncompiled."""

    def decorate(kind: Class) -> Class:
        for name in names.split():
            setattr(kind, name, uncompiled(getattr(kind, name)))
        return kind

    return decorate
