"""Clipping before the mean is taken: noticed where torch's own functions do it, and refused by the next step.

A script for one process clips between `backward` and `step`. On many ranks the gradients there are a rank's own: each
rank would clip by another norm, and the mean of what is left is not the clipped mean. Nothing else tells clipping from
what may be done there: a version counter also counts a scaling by hand, which is exact. So torch's functions are
wrapped as soon as there is an optimizer for which it matters; they do what they did before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from torchmn._torch_compat import version_of, wrap_clip_grads_with_norm
from torchmn.communicators.communicator import Communicator
from torchmn.context import process
from torchmn.errors import MismatchError, ParallelizeError
from torchmn.optim.events import Optimizing, StepGuard, guard
from torchmn.optim.gradients import Gradient

Clipped = tuple[str, float]
"""By which function, and by which factor: 1 if nothing was too large."""


@dataclass(frozen=True)
class Clipping:
    """Gradients that a function of torch has clipped, and what they are now."""

    function: str
    factor: Tensor
    versions: dict[int, tuple[Tensor, int]]
    parameters: frozenset[int] = frozenset()  # ids of those whose gradients they are, valid during `note_clipping`

    def concerns(self, gradients: Iterable[Tensor | None]) -> bool:
        """Whether one of these was clipped, and nobody has changed it since."""
        found = ((x, *self.versions.get(id(x), (None, 0))) for x in gradients if x is not None)
        return any(x is clipped and version_of(x) == version for x, clipped, version in found)

    def result(self) -> Clipped:
        return self.function, min(1.0, float(self.factor))


@guard(
    on="step",
    why="each rank would clip its own gradients by another norm, and the mean of what is left is not the clipped mean",
    replaces="torch.nn.utils.clip_grad_value_ and _clip_grads_with_norm_: it looks like any scaling",
)
class OwnClipping(StepGuard):
    """Refuses a step with gradients that were clipped before their mean was taken."""

    def __init__(self, seen: Optimizing) -> None:
        super().__init__(seen)
        self._clipping: Clipping | None = None  # of gradients that are not means
        if seen.comm.size > 1:
            _listeners().add(self)

    def refuse_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        """Called before gradients are clipped, of whichever parameters."""
        self.seen.refuse_clipping(function, parameters)

    def note_clipping(self, clipping: Clipping) -> None:
        """Called when gradients were clipped, of any parameters: until `synchronize`, they are this rank's own."""
        seen = self.seen
        # Those of another optimizer may be in use by another thread, and torch does not lock them: leave them alone.
        if not any(id(p) in clipping.parameters for group in seen.actual.param_groups for p in group["params"]):
            return
        grads = seen.collection.gradients()
        if not clipping.concerns(grad.value for grad in grads):
            return
        if not seen.synchronized.cover(grads):
            self._clipping = clipping
        elif clipping.function == "clip_grad_norm_" and any(grad.over is not None for grad in grads):
            raise ParallelizeError(
                f"rank {seen.comm.rank} of {seen.comm.size}: clip_grad_norm_ of torch took the norm of what this rank "
                "holds, its slices of split layers: each rank would clip by another norm. Call "
                "torchmn.clip_grad_norm_(model, max_norm) in its place"
            )

    def cleared(self) -> None:
        self._clipping = None

    def differ(self, grads: list[Gradient]) -> Clipped | None:
        """Returns how this rank's gradients were clipped; once."""
        last, self._clipping = self._clipping, None
        return last.result() if last is not None and last.concerns(grad.value for grad in grads) else None

    def check(self, statements: Sequence[Clipped | None], grads: list[Gradient]) -> None:
        _refuse_own_clipping(self.seen.comm, "optimizer step", statements)


class Listeners:
    """The guards that are told what torch's functions clip. Ranks that are threads share them."""

    def __init__(self) -> None:
        self._guards: WeakSet[OwnClipping] = WeakSet()

    def add(self, guard: OwnClipping) -> None:
        with process.lock:
            self._guards.add(guard)

    def refuse(self, parameters: list[Tensor], function: str) -> None:
        """Gradients are about to be clipped."""
        if torch.compiler.is_compiling():  # a function that clips: nothing of this can be compiled
            return
        for each in self._now():
            each.refuse_clipping(function, parameters)

    def note(self, parameters: list[Tensor], function: str, factor: Tensor) -> None:
        """Gradients were clipped."""
        if torch.compiler.is_compiling():
            return
        versions = {id(x): (x, version_of(x)) for x in _dense_gradients(parameters)}
        clipping = Clipping(function, factor, versions, frozenset(map(id, parameters)))
        for each in self._now():
            each.note_clipping(clipping)

    def _now(self) -> list[OwnClipping]:
        with process.lock:
            return list(self._guards)


def _listeners() -> Listeners:
    """Those of torch's functions, which have them from the first call on."""
    with process.lock:
        if not hasattr(clip_grad.clip_grad_value_, "listeners"):
            _wrap_functions_of_torch(Listeners())
        return clip_grad.clip_grad_value_.listeners  # type: ignore[attr-defined]


def _refuse_own_clipping(comm: Communicator, operation: str, clipped: Sequence[Clipped | None]) -> None:
    """Raise if ranks have clipped by different factors; all of them know all ranks' `clipped`.

    Equal factors are fine: nothing was too large on any rank, or the user has taken the mean already.
    """
    factors = [1.0 if one is None else one[1] for one in clipped]
    if len(set(factors)) == 1 or not min(factors) < 1:
        return
    function = next(one[0] for one in clipped if one is not None)
    by_rank = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
    raise MismatchError(
        f"rank {comm.rank} of {comm.size}: {operation}: {function} was called before the mean of the gradients was "
        f"taken, and scaled each rank's own by another factor ({by_rank}): their mean is not the clipped mean. Call "
        f"optimizer.synchronize() between backward and {function} (which needs double_buffering=False)"
    )


def _wrap_functions_of_torch(listeners: Listeners) -> None:
    """Let the functions tell `listeners`."""
    by_value = clip_grad.clip_grad_value_

    @functools.wraps(by_value)
    def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
        parameters = _listed(parameters)
        listeners.refuse(parameters, "clip_grad_value_")
        largest = [torch.linalg.vector_norm(x.detach(), float("inf")) for x in _dense_gradients(parameters)]
        result = by_value(parameters, clip_value, *args, **kwargs)
        if largest:
            factor = float(clip_value) / torch.stack([x.double() for x in largest]).max()
            listeners.note(parameters, "clip_grad_value_", factor)
        return result

    clip_grad_value_.listeners = listeners  # type: ignore[attr-defined]
    clip_grad.clip_grad_value_ = utils.clip_grad_value_ = clip_grad_value_
    wrap_clip_grads_with_norm(functools.partial(_observed, listeners))


def _observed(listeners: Listeners, by_norm: Callable[..., Any]) -> Callable[..., Any]:
    """The function that scales gradients in `clip_grad_norm_`, with calls of `listeners` before and after."""

    @functools.wraps(by_norm)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
        parameters = _listed(parameters)
        listeners.refuse(parameters, "clip_grad_norm_")
        result = by_norm(parameters, max_norm, total_norm, *args, **kwargs)
        factor = float(max_norm) / (total_norm.detach() + 1e-6)  # torch's formula
        listeners.note(parameters, "clip_grad_norm_", factor)
        return result

    return clip_grads_with_norm_


def _listed(parameters: Any) -> list[Tensor]:
    """The parameters, which may come from a generator that gives them only once."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _dense_gradients(parameters: list[Tensor]) -> list[Tensor]:
    present = (p.grad for p in parameters if p.grad is not None)
    return [x for x in present if x.layout is torch.strided and x.numel() and not x.is_inference()]
