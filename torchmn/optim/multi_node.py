"""MultiNodeOptimizer: an optimizer that steps with the mean of the gradients of all ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchmn._torch_compat import foreach_mul_
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.communicators.models import bcast_tensors
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.optim import gradients
from torchmn.optim.checks import OPERATION, check, groups_as_text
from torchmn.optim.events import WatchedOptimizer, guards_of, overriding
from torchmn.optim.gradients import Gradient, GradientCollection, StepFingerprint
from torchmn.optim.lazy import LazyParameters, not_lazy
from torchmn.optim.reducers import DelayedReducer, ImmediateReducer, OverlappedReducer, Reducer
from torchmn.optim.synchronized import SynchronizedGradients
from torchmn.optim.wrapper import WrappedOptimizer
from torchmn.other_spellings import other_spellings


class MultiNodeOptimizer(WrappedOptimizer):
    """Wraps an optimizer: `step()` averages the gradients over ranks, then runs its step.

    To use the mean between `backward` and `step` (clipping, a GradScaler), call `synchronize()` first. `param_groups`,
    `state`, `state_dict`, hooks and learning rates are those of the wrapped optimizer.

    `create_multi_node_optimizer` creates it, and describes the arguments.
    """

    # GradScaler then calls step on every rank, also after an overflow.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        actual_optimizer: Optimizer,
        comm: Communicator,
        model: nn.Module | None = None,
        zero_fill: bool = True,
        grad_dtype: torch.dtype | None = None,
        reducer: type[ImmediateReducer] = ImmediateReducer,
    ):
        super().__init__(actual_optimizer)
        self.comm = comm
        names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        self._collection = GradientCollection(actual_optimizer, names)
        self._model = model
        self._warned = False
        self._synchronized = SynchronizedGradients()
        self._bcast_initial_values(model)
        self._collection.mark_trainable()
        self._lazy: LazyParameters | None = None
        if self._collection.lazy():
            self._lazy = LazyParameters(comm, self._collection, names, weakref.WeakMethod(self._lazy_initialized))
        dtype = grad_dtype if grad_dtype is not None else comm.settings.grad_dtype
        self._reducer: Reducer = reducer(self._collection, comm, zero_fill, dtype)
        check_clipping = self._reducer.check_clipping
        watched = WatchedOptimizer(comm, actual_optimizer, model, self._collection, self._synchronized, check_clipping)
        self._guards = guards_of(watched)
        self._same_guards = overriding(self._guards, "same")
        self._differ_guards = overriding(self._guards, "differ")
        self._stepped_guards = overriding(self._guards, "stepped")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.actual_optimizer!r}, {self.comm!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, on every rank; broadcasts rank 0's values of its parameters."""
        self._reducer.before_new_group()
        self.actual_optimizer.add_param_group(param_group)
        added_group: dict[str, Any] = groups_as_text(self.actual_optimizer, first=len(self.param_groups) - 1)
        lazy = any(is_lazy(p) for p in self.param_groups[-1]["params"])
        problem = (
            "expected parameters with a shape, got lazy ones: run a forward of their module before" if lazy else None
        )
        self.comm.agree("add_param_group", problem, **added_group)
        count = len(self.param_groups[-1]["params"])
        added = self._collection.gradients()[-count:]
        self._bcast_parameters(added)
        # Only these: other parameters that were unfrozen meanwhile are broadcast at the next step.
        self._collection.mark_trainable(added)
        self._reducer.after_new_group()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._reducer.discard()
        self._synchronized.clear()
        for guard in self._guards:
            guard.cleared()
        self.actual_optimizer.zero_grad(set_to_none=set_to_none)

    # -- stepping ----------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """Averages the gradients over ranks, unless `synchronize` did, and runs a step. Every rank must call it.

        Args:
            closure: as for torch's optimizers (LBFGS). Its loss is averaged over ranks, too, so that all ranks make
                the same decisions.
            weight: number of samples in this rank's batch, if ranks may have different numbers: the mean is then the
                gradient of the mean loss over all samples. All ranks must pass one, or none.

        Returns:
            What the step of the wrapped optimizer returns; None if no step was made.

        Raises:
            MismatchError: on every rank, if ranks would make different steps.
        """
        if self._reducer.no_sync:
            raise ArgumentError(f"rank {self.comm.rank} of {self.comm.size}: step inside no_sync: leave it first")
        if closure is not None:
            self._reducer.check_supported("step with a closure")
            return self._update(self._averaging(closure, weight))
        if "found_inf" in self.__dict__:  # set by a GradScaler during its call
            self._reducer.check_supported("step with a GradScaler")
            return self._step_scaled()
        return self._update() if self._ensure_mean(weight) else None

    def synchronize(self, weight: float | None = None) -> None:
        """Replaces every gradient by its mean over ranks; the next `step` does not average again.

        A `backward` after this adds this rank's gradients, and the next `step` averages again, which does not change
        what is the same on all ranks.

        Args:
            weight: as for `step`.
        """
        self._reducer.check_supported("synchronize")
        self._take_mean(self._collection.gradients(), weight)
        self._synchronized.set(self._collection.gradients())

    def flush(self) -> None:
        """With double buffering, runs a step with the last gradients; otherwise does nothing."""
        if self._install(self._reducer.flush()):
            self._update()

    def weigh(self, loss: Tensor, samples: float) -> Tensor:
        """Returns `loss`, weighted so that `step()` without a weight is exact. Every rank must call it.

        For batches of different sizes in models whose layers communicate (multi-node batch normalisation): their
        backward mixes the gradients of ranks, so that `step(weight=...)` is too late.

        Args:
            loss: mean loss over this rank's samples.
            samples: number of this rank's samples.

        Returns:
            The weighted loss, for `backward`.
        """
        return loss * gradients.loss_weight(self.comm, samples)

    def _ensure_mean(self, weight: float | None) -> bool:
        """Averages the gradients, unless `synchronize` did; returns False if the means are not complete yet."""
        grads = self._collection.gradients()
        if self._synchronized.are(grads):
            # A rank that ran another backward since would average with the next gradients of the others.
            self.comm.agree("optimizer step after synchronize")
            complete = True
        else:
            complete = self._take_mean(grads, weight)
        self._synchronized.clear()
        return complete

    @uncompiled
    def _take_mean(self, grads: list[Gradient], weight: float | None) -> bool:
        """Replaces every gradient by its mean over ranks; returns False if the means are not complete yet."""
        agreement = self._agree(grads, weight)
        return self._install(self._reducer.reduce(grads, agreement))

    def _install(self, means: list[Gradient] | None) -> bool:
        for grad in means or ():
            grad.parameter.grad = grad.value
        return means is not None

    def _agree(self, grads: list[Gradient], weight: float | None) -> gradients.StepAgreement:
        """Compares gradients and fingerprints over ranks; broadcasts parameters that were unfrozen."""
        unfrozen = self._collection.unfrozen(grads)
        agreement = self._reducer.agree(grads, weight, self._fingerprint(grads, unfrozen))
        if agreement.statements is not None:
            for guard, statements in zip(self._differ_guards, agreement.statements, strict=True):
                guard.check(statements, grads)
        if grads and agreement.kinds is not None and not any(agreement.kinds):
            self._warn_of_no_gradients()
        if not agreement.equal and self._model is not None:
            crossing = [n for n, m in self._model.named_modules() if getattr(m, "gradients_cross_ranks", False)]
            if crossing:
                raise ArgumentError(
                    f"rank {self.comm.rank} of {self.comm.size}: step(weight=...) with unequal weights, but the "
                    f"gradients of {', '.join(crossing)} have crossed ranks in backward already: use "
                    "optimizer.weigh(loss, samples).backward() and then step()"
                )
        if unfrozen:  # their values may differ between ranks
            self._bcast_parameters(unfrozen)
        self._collection.mark_trainable()
        return agreement

    def _warn_of_no_gradients(self) -> None:
        if not self._warned and self.comm.rank == 0:
            warnings.warn(
                "step: no parameter of this optimizer has a gradient on any rank, so nothing changes. Was backward "
                "called? Was the model replaced (create_mnbn_model, parallelize) after its parameters were given here?",
                stacklevel=7,  # the caller of step
            )
        self._warned = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which `backward` only accumulates this rank's gradients, and `step` raises an error."""
        outer, self._reducer.no_sync = self._reducer.no_sync, True
        try:
            yield
        finally:
            self._reducer.no_sync = outer

    def _averaging(self, closure: Callable[[], Any], weight: float | None) -> Callable[[], Any]:
        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._ensure_mean(weight)
            if loss is None:  # for optimizers that do not use it
                return None
            value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
            if weight is None:
                return self.comm.allreduce(value, "mean")
            samples = value.new_full(value.shape, float(weight), dtype=torch.float64)
            # Without samples the mean loss of a rank is 0/0, and 0 times NaN is not 0.
            weighted = value.double() * samples if weight else torch.zeros_like(samples)
            total, count = self.comm.allreduce(torch.stack([weighted, samples]))
            return (total / count).to(value.dtype)

        return averaged

    def _step_scaled(self) -> Any:
        """A step that a GradScaler calls: undoes its scale, and is skipped if a gradient overflowed."""
        scale, found_inf = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        problem = None
        if not self._synchronized.cover(self._collection.gradients()):
            # The scaler has checked this rank's gradients only for overflow, so ranks would diverge.
            problem = "call optimizer.synchronize() between backward and scaler.unscale_ or scaler.step"
        overflow = bool(found_inf.item())
        # They differ if unscale_ was called before synchronize, or if ranks started with different scales.
        same = {"scale": None if scale is None else float(scale), "overflow found": overflow}
        self.comm.agree("optimizer step with a GradScaler", problem, **same)
        self._synchronized.clear()
        if overflow:
            return None
        if scale is not None:
            values = [grad.value for grad in self._collection.gradients() if grad.value is not None]
            foreach_mul_(values, float(scale.double().reciprocal()))
        return self._update()

    # -- guards and state --------------------------------------------------------------------------------------

    def _fingerprint(self, grads: list[Gradient], unfrozen: list[Gradient]) -> StepFingerprint:
        """Returns what ranks compare besides gradients, so that their models cannot diverge."""
        same: dict[str, Any] = {"unfrozen": tuple([grad.name for grad in unfrozen])}
        if self._lazy is not None:
            same["parameters without a shape"] = self._lazy.names()
            if not same["parameters without a shape"]:
                self._lazy = None
        for guard in self._same_guards:
            same |= guard.same(grads)
        return StepFingerprint(same, tuple([guard.differ(grads) for guard in self._differ_guards]))

    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        try:
            return super()._update(closure)
        finally:
            for guard in self._stepped_guards:
                guard.stepped()

    def state_dict(self) -> dict[str, Any]:
        self._reducer.check_supported("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, which must be the same on every rank; the next step raises an error if it is not."""
        self._reducer.check_supported("load_state_dict")  # pending gradients would be applied to the loaded state
        super().load_state_dict(state_dict)
        for guard in self._guards:
            guard.loaded()

    def _bcast_initial_values(self, model: nn.Module | None) -> None:
        """Broadcasts rank 0's values of all parameters, and of the model's buffers."""
        named = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
        of_model = {id(x) for _, x in named}
        named += [
            (grad.name, grad.parameter) for grad in self._collection.gradients() if id(grad.parameter) not in of_model
        ]
        bcast_tensors(self.comm, not_lazy(_shared(named)), OPERATION)

    def _lazy_initialized(self) -> None:
        """Called on all ranks when lazy parameters have rank 0's values."""
        self._reducer.before_new_group()
        self._collection.mark_trainable()
        self._reducer.after_new_group()
        for guard in self._guards:
            guard.initialized()

    def _bcast_parameters(self, grads: list[Gradient]) -> None:
        """Broadcasts rank 0's values of the parameters of `grads`."""
        named = [(grad.name, grad.parameter) for grad in grads]
        bcast_tensors(self.comm, list(_shared(named)), OPERATION)


def _shared(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Returns `named` without slices, which differ between ranks."""
    return ((name, x) for name, x in named if role_of(x).over is None)


@other_spellings
def create_multi_node_optimizer(
    actual_optimizer: Optimizer,
    comm: Communicator | ProcessGrid,
    *,
    model: nn.Module | None = None,
    double_buffering: bool = False,
    overlap: bool = False,
    zero_fill: bool = True,
    grad_dtype: torch.dtype | None = None,
) -> MultiNodeOptimizer:
    """Returns an optimizer that averages gradients over ranks before each step. Every rank must call it.

    Broadcasts rank 0's values of the parameters to all ranks, and with `model` those of its buffers. Parameters of lazy
    modules are broadcast in the module's first forward, which all ranks must run.

    Args:
        actual_optimizer: optimizer to wrap; afterwards, its `step` must not be called directly.
        comm: communicator of all ranks that train together, or the grid of a parallel model.
        model: whose parameters `actual_optimizer` has. Errors then name parameters, and more mistakes are detected.
        double_buffering: step k applies the gradients of step k-1 while those of step k are averaged. Call `flush()`
            after the last step.
        overlap: average gradients while backward computes others. The numbers are the same; may be faster on a network
            or with GPUs.
        zero_fill: a gradient that only some ranks have counts as zeros on the others; if False, it raises an error.
        grad_dtype: torch.float16 or torch.bfloat16 to send gradients compressed; they are summed in float32.

    Returns:
        A `MultiNodeOptimizer`, which is a `torch.optim.Optimizer`.

    Raises:
        ArgumentError: on every rank, if one rank's arguments are wrong.
        MismatchError: on every rank, if optimizers or options differ.
    """
    if isinstance(comm, ProcessGrid):
        comm = comm.comm
    comm = as_communicator(comm, "create_multi_node_optimizer")
    options = {
        "double_buffering": bool(double_buffering),
        "overlap": bool(overlap),
        "zero_fill": bool(zero_fill),
        "grad_dtype": comm.settings.grad_dtype if grad_dtype is None else grad_dtype,
    }
    check(actual_optimizer, comm, model, options)
    reducer = DelayedReducer if double_buffering else OverlappedReducer if overlap else ImmediateReducer
    return MultiNodeOptimizer(actual_optimizer, comm, model, zero_fill, grad_dtype, reducer)
