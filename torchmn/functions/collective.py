"""Call: one differentiable collective operation, for which all ranks agree whether a backward follows.

Autograd visits a node only if this rank needs its gradient, but the backward of a collective operation needs all
ranks. So each rank sends, with the comparison of arguments that precedes every operation, whether it needs a gradient;
if one does, all add a node to their graphs. Calls are numbered, and backward operations carry the number of their call:
if a rank's backward skips one, all ranks raise an error instead of receiving the gradient of another call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.errors import ArgumentError, MismatchError
from torchmn.functions import recomputation
from torchmn.other_spellings import adapted

Result = TypeVar("Result")

NO_GRAD, NEEDS_NONE, NEEDS_GRADIENT = range(3)
"""What a rank sends to the others: called under no_grad; needs no gradient of this call; needs one."""

# The gradient of these needs the values of all ranks: which rank has the maximum, or the product of the other ranks.
REDUCE_GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
    "prod": lambda values: values.prod(0),
}


class Call(NamedTuple):
    """One differentiable collective operation, or its backward.

    Attributes:
        comm: communicator of the operation.
        number: of the call, the same on all ranks.
        order: 0 in forward, 1 in its backward, 2 in the backward of that, and so on.
    """

    comm: Communicator
    number: int
    order: int = 0

    @staticmethod
    def new(comm: Any) -> Call:
        """Returns the next call of a communicator; raises an ArgumentError if `comm` is not one."""
        if not isinstance(comm, Communicator):
            comm = _other_communicator(comm)
        if not recomputation.replaying():
            comm.noting.calls += 1
        return Call(comm, comm.noting.calls)

    def backward(self) -> Call:
        """Returns the backward of this call."""
        return self._replace(order=self.order + 1)

    def perform(self, needs_gradient: bool, operation: Callable[[], Result]) -> tuple[Result, bool]:
        """Runs `operation`; returns its result and whether it must be part of the graph: the same on all ranks."""
        if recomputation.replaying():
            return recomputation.replay(self.comm, f"a collective operation of {self.comm.name}")
        comm = self.comm
        need = NO_GRAD if not torch.is_grad_enabled() else NEEDS_GRADIENT if needs_gradient else NEEDS_NONE
        call = "backward of " * self.order + f"torchmn.functions call {self.number}"
        with comm.noting(need, self.number << 8 | self.order, call, optional=need == NO_GRAD) as piggyback:
            result = operation()
        needs = piggyback.notes
        in_graph = NEEDS_GRADIENT in needs
        if in_graph and not {NO_GRAD, None}.isdisjoint(needs):
            self._raise_partly_no_grad(needs)
        if recomputation.recording():
            recomputation.record(f"a collective operation of {comm.name}", (result, in_graph))
        return result, in_graph

    def _raise_partly_no_grad(self, needs: Sequence[int | None]) -> None:
        needing = [rank for rank, need in enumerate(needs) if need == NEEDS_GRADIENT]
        without = [rank for rank, need in enumerate(needs) if need in (NO_GRAD, None)]
        raise MismatchError(
            f"rank {self.comm.rank} of {self.comm.size}: a collective operation needs its gradient on rank "
            f"{ranks_text(needing)}, but rank {ranks_text(without)} called it under torch.no_grad, and would not take "
            "part in its backward. Call it under no_grad on all ranks, or on none."
        )


def _other_communicator(given: object) -> Communicator:
    """Returns the communicator for one of another library; raises an ArgumentError for anything else."""
    comm = adapted(given)
    if comm is None:
        raise ArgumentError(
            "expected a communicator as the first argument of a collective function, as in F.allreduce(comm, x), "
            f"got {describe(given)}"
        )
    return comm


def needs_gradient(x: Any) -> bool:
    """Whether a gradient of `x` is needed. Accepts any `x`: the operation checks arguments, on all ranks together."""
    if isinstance(x, Tensor):
        return x.requires_grad
    return any(each.requires_grad for each in tensors_in(x))


def as_sequence(xs: Any, size: int) -> Any:
    """Returns `xs`, split along its first dim if it is one tensor with `size` rows."""
    return xs.unbind() if isinstance(xs, Tensor) and xs.dim() and xs.shape[0] == size else xs


def tensors_in(xs: Any) -> tuple[Tensor, ...]:
    """Returns the tensors in an argument: itself, or the tensors of a list or tuple."""
    if isinstance(xs, Tensor):
        return (xs,)
    if not isinstance(xs, list | tuple):
        return ()
    return tuple([x for x in cast("Sequence[Any]", xs) if isinstance(x, Tensor)])


def zero_gradients(delegate: Tensor, xs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Returns zeros in the shapes of `xs` whose graph leads to `delegate`; None for each if it needs no gradient."""
    if not delegate.requires_grad:
        return (None,) * len(xs)
    return tuple([delegate.to(x.dtype).expand(x.shape) for x in xs])
