"""Guard against clipping gradients before they are averaged.

A script for one process clips between `backward` and `step`. On many ranks gradients are not averaged then: each rank
would clip by a different norm, and the mean of the clipped gradients is not the clipped mean. A version counter
cannot detect this, because it also counts a scaling by the user, which is exact. So torch's clipping functions are
wrapped as soon as there is a multi-node optimizer on several ranks. What they compute does not change.
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
from torchmn.optim.events import StepGuard, WatchedOptimizer, guard
from torchmn.optim.gradients import Gradient

Clipped = tuple[str, float]
"""The clipping function, and the factor of the gradients: 1 if nothing was too large."""


@dataclass(frozen=True)
class Clipping:
    """Gradients that a function of torch has clipped, with their version counters afterwards."""

    function: str
    factor: Tensor
    versions: dict[int, tuple[Tensor, int]]
    parameters: frozenset[int] = frozenset()  # ids, valid during `on_clipped`

    def concerns(self, gradients: Iterable[Tensor | None]) -> bool:
        """Whether one of these was clipped, and was not changed since."""
        found = ((x, *self.versions.get(id(x), (None, 0))) for x in gradients if x is not None)
        return any(x is clipped and version_of(x) == version for x, clipped, version in found)

    def result(self) -> Clipped:
        """Returns the function and the factor."""
        return self.function, min(1.0, float(self.factor))


@guard(
    on="step",
    why="each rank would clip its gradients by a different norm, and the mean of these is not the clipped mean",
    replaces="torch.nn.utils.clip_grad_value_ and _clip_grads_with_norm_: a version counter cannot detect clipping",
)
class LocalClipping(StepGuard):
    """Raises an error in a step with gradients that were clipped before they were averaged."""

    def __init__(self, watched: WatchedOptimizer) -> None:
        super().__init__(watched)
        self._clipping: Clipping | None = None  # of gradients that were not averaged
        if watched.comm.size > 1:
            _LISTENERS.add(self)

    def check_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        """Called before gradients of any parameters are clipped."""
        self.watched.check_clipping(function, parameters)

    def on_clipped(self, clipping: Clipping) -> None:
        """Called after gradients of any parameters were clipped."""
        watched = self.watched
        # Another thread may use the gradients of another optimizer, and torch does not lock them.
        if not any(id(p) in clipping.parameters for group in watched.actual.param_groups for p in group["params"]):
            return
        grads = watched.collection.gradients()
        if not clipping.concerns(grad.value for grad in grads):
            return
        if not watched.synchronized.cover(grads):
            self._clipping = clipping
        elif clipping.function == "clip_grad_norm_" and any(grad.over is not None for grad in grads):
            raise ParallelizeError(
                f"rank {watched.comm.rank} of {watched.comm.size}: clip_grad_norm_ of torch used the norm of this "
                "rank's slices of split layers only: each rank would clip by a different norm. Call "
                "torchmn.clip_grad_norm_(model, max_norm) instead"
            )

    def cleared(self) -> None:
        self._clipping = None

    def differ(self, grads: list[Gradient]) -> Clipped | None:
        """Returns how this rank's gradients were clipped since the last step."""
        last, self._clipping = self._clipping, None
        return last.result() if last is not None and last.concerns(grad.value for grad in grads) else None

    def check(self, statements: Sequence[Clipped | None], grads: list[Gradient]) -> None:
        _raise_local_clipping(self.watched.comm, "optimizer step", statements)


class Listeners:
    """The guards that are called when torch's functions clip; shared by ranks that are threads."""

    def __init__(self) -> None:
        self._guards: WeakSet[LocalClipping] = WeakSet()
        self._wrapped_torch = False

    def add(self, guard: LocalClipping) -> None:
        with process.lock:
            if not self._wrapped_torch:
                _wrap_torch_clipping(self)
                self._wrapped_torch = True
            self._guards.add(guard)

    def before(self, parameters: list[Tensor], function: str) -> None:
        """Called before gradients are clipped."""
        if torch.compiler.is_compiling():  # the guards cannot be compiled
            return
        for each in self._snapshot():
            each.check_clipping(function, parameters)

    def after(self, parameters: list[Tensor], function: str, factor: Tensor) -> None:
        """Called after gradients were clipped."""
        if torch.compiler.is_compiling():
            return
        versions = {id(x): (x, version_of(x)) for x in _dense_gradients(parameters)}
        clipping = Clipping(function, factor, versions, frozenset(map(id, parameters)))
        for each in self._snapshot():
            each.on_clipped(clipping)

    def _snapshot(self) -> list[LocalClipping]:
        with process.lock:
            return list(self._guards)


_LISTENERS = Listeners()


def _raise_local_clipping(comm: Communicator, operation: str, clipped: Sequence[Clipped | None]) -> None:
    """Raises on all ranks if they have clipped by different factors.

    Equal factors are correct: nothing was too large on any rank, or the user has averaged the gradients already.
    """
    factors = [1.0 if one is None else one[1] for one in clipped]
    if len(set(factors)) == 1 or not min(factors) < 1:
        return
    function = next(one[0] for one in clipped if one is not None)
    by_rank = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in enumerate(factors))
    raise MismatchError(
        f"rank {comm.rank} of {comm.size}: {operation}: {function} was called before the gradients were averaged, "
        f"and scaled those of each rank by a different factor ({by_rank}): their mean is not the clipped mean. Call "
        f"optimizer.synchronize() between backward and {function} (which needs double_buffering=False)"
    )


def _wrap_torch_clipping(listeners: Listeners) -> None:
    """Wraps torch's clipping functions with calls of `listeners` before and after."""
    by_value = clip_grad.clip_grad_value_

    @functools.wraps(by_value)
    def clip_grad_value_(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
        parameters = _as_list(parameters)
        listeners.before(parameters, "clip_grad_value_")
        largest = [torch.linalg.vector_norm(x.detach(), float("inf")) for x in _dense_gradients(parameters)]
        result = by_value(parameters, clip_value, *args, **kwargs)
        if largest:
            factor = float(clip_value) / torch.stack([x.double() for x in largest]).max()
            listeners.after(parameters, "clip_grad_value_", factor)
        return result

    clip_grad.clip_grad_value_ = utils.clip_grad_value_ = clip_grad_value_
    wrap_clip_grads_with_norm(functools.partial(_wrap_norm_clipping, listeners))


def _wrap_norm_clipping(listeners: Listeners, by_norm: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the function that scales gradients in `clip_grad_norm_`."""

    @functools.wraps(by_norm)
    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
        parameters = _as_list(parameters)
        listeners.before(parameters, "clip_grad_norm_")
        result = by_norm(parameters, max_norm, total_norm, *args, **kwargs)
        factor = float(max_norm) / (total_norm.detach() + 1e-6)  # torch's formula
        listeners.after(parameters, "clip_grad_norm_", factor)
        return result

    return clip_grads_with_norm_


def _as_list(parameters: Any) -> list[Tensor]:
    """Returns the parameters as a list; they may come from a generator."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _dense_gradients(parameters: list[Tensor]) -> list[Tensor]:
    present = (p.grad for p in parameters if p.grad is not None)
    return [x for x in present if x.layout is torch.strided and x.numel() and not x.is_inference()]
