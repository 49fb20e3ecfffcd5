"""What the differentiable collective operations have in common: ranks agree whether backward will come.

Autograd visits a node only if something on this rank needs its gradient, but the backward of a collective operation
needs all ranks. So ranks tell each other, in the comparison of arguments that precedes every operation, whether they
need a gradient; if one does, all put the operation into their graphs. Calls are numbered, and backward says which
call it belongs to: a rank whose backward skips one gets an error, as all ranks do, and not another call's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.watchdog.waits import ranks_text
from torchmn.errors import ArgumentError, MismatchError
from torchmn.functions import recomputation

Result = TypeVar("Result")

NO_GRAD, NEEDS_NONE, NEEDS_GRADIENT = range(3)
"""What a rank notes for the others: called under no_grad; needs no gradient here; needs one."""

# Which rank had the largest value, and what the product of the others is, can not be told from the result alone.
OF_ALL_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
    "prod": lambda values: values.prod(0),
}


class Call(NamedTuple):
    """One differentiable collective operation, or the backward of one."""

    comm: Communicator
    number: int
    order: int = 0

    @staticmethod
    def new(comm: Communicator) -> Call:
        if not isinstance(comm, Communicator):
            raise ArgumentError(
                "expected a communicator as the first argument of a collective function, as in F.allreduce(comm, x), "
                f"got {describe(comm)}"
            )
        if not recomputation.replaying():
            comm.noting.calls += 1
        return Call(comm, comm.noting.calls)

    def backward(self) -> Call:
        return self._replace(order=self.order + 1)

    def perform(self, needs_gradient: bool, operation: Callable[[], Result]) -> tuple[Result, bool]:
        """What `operation` returns, and whether it must be part of the graph: the same on all ranks."""
        if recomputation.replaying():
            return recomputation.replay(self.comm, f"a collective operation of {self.comm.name}")
        comm = self.comm
        wish = NO_GRAD if not torch.is_grad_enabled() else NEEDS_GRADIENT if needs_gradient else NEEDS_NONE
        call = "backward of " * self.order + f"torchmn.functions call {self.number}"
        with comm.noting(wish, self.number << 8 | self.order, call, optional=wish == NO_GRAD) as noted:
            result = operation()
        wishes = noted.notes
        needed = NEEDS_GRADIENT in wishes
        if needed and not {NO_GRAD, None}.isdisjoint(wishes):
            self._refuse(wishes)
        if recomputation.keeping():
            recomputation.record(f"a collective operation of {comm.name}", (result, needed))
        return result, needed

    def _refuse(self, wishes: Sequence[int | None]) -> None:
        needing = [rank for rank, wish in enumerate(wishes) if wish == NEEDS_GRADIENT]
        without = [rank for rank, wish in enumerate(wishes) if wish in (NO_GRAD, None)]
        raise MismatchError(
            f"rank {self.comm.rank} of {self.comm.size}: a collective operation needs its gradient on rank "
            f"{ranks_text(needing)}, but rank {ranks_text(without)} called it under torch.no_grad, and would not take "
            "part in its backward. Call it under no_grad on all ranks, or on none."
        )


def needs_gradient(x: Any) -> bool:
    """Whether a gradient of `x` is needed; x may be anything, because wrong arguments are refused later, by all."""
    if isinstance(x, Tensor):
        return x.requires_grad
    return isinstance(x, list | tuple) and any(isinstance(each, Tensor) and each.requires_grad for each in x)


def parts_of(xs: Any, size: int) -> Any:
    """`xs` as a sequence, if it is one tensor whose first dim is the number of ranks."""
    return xs.unbind() if isinstance(xs, Tensor) and xs.dim() and xs.shape[0] == size else xs


def tensors_in(xs: Any) -> tuple[Tensor, ...]:
    """The tensors that a rank which is not the root has passed: their graph stays connected through the operation."""
    if isinstance(xs, Tensor):
        return (xs,)
    return tuple(x for x in xs if isinstance(x, Tensor)) if isinstance(xs, list | tuple) else ()


def as_gradient_of(delegate: Tensor, xs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Zeros in the shapes of `xs` through which autograd reaches `delegate`; nothing if it needs not."""
    if not delegate.requires_grad:
        return (None,) * len(xs)
    return tuple([delegate.to(x.dtype).expand(x.shape) for x in xs])
