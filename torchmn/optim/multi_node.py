"""MultiNodeOptimizer: an optimizer that steps with the mean of all ranks' gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchmn._torch_compat import foreach_mul_
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.models import bcast_tensors
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.optim import gradients
from torchmn.optim.checks import OPERATION, check, groups_as_text
from torchmn.optim.events import Optimizing, guards_of, overriding
from torchmn.optim.gradients import Collection, Facts, Gradient
from torchmn.optim.reducers import Delayed, Immediate, Overlapped, Reducer
from torchmn.optim.synchronized import SynchronizedGradients
from torchmn.optim.wrapper import WrappedOptimizer


class MultiNodeOptimizer(WrappedOptimizer):
    """Behaves as the optimizer that it wraps, on the mean of the gradients of all ranks.

    `step()` takes the mean and lets the wrapped optimizer step. Between `backward` and `step`, whoever wants to
    see the mean (clipping, a GradScaler) calls `synchronize()` first. Everything else is the wrapped optimizer's:
    `param_groups`, `state`, `state_dict`, hooks, learning rates.
    """

    # GradScaler then calls step on every rank, and leaves to it what an overflow means.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        actual_optimizer: Optimizer,
        comm: Communicator,
        model: nn.Module | None = None,
        zero_fill: bool = True,
        grad_dtype: torch.dtype | None = None,
        reducer: type[Immediate] = Immediate,
    ):
        super().__init__(actual_optimizer)
        self.comm = comm
        names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
        self._collection = Collection(actual_optimizer, names)
        self._model = model
        self._warned = False
        self._synchronized = SynchronizedGradients()
        self._bcast_at_first(model)
        self._collection.keep_trainable()
        dtype = grad_dtype if grad_dtype is not None else comm.settings.grad_dtype
        self._reducer: Reducer = reducer(self._collection, comm, zero_fill, dtype)
        refuse_clipping = self._reducer.refuse_clipping
        seen = Optimizing(comm, actual_optimizer, model, self._collection, self._synchronized, refuse_clipping)
        self._guards = guards_of(seen)
        self._comparing = overriding(self._guards, "same")
        self._stating = overriding(self._guards, "differ")
        self._watching = overriding(self._guards, "stepped")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.actual_optimizer!r}, {self.comm!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, on every rank; its parameters become rank 0's at once."""
        self._reducer.before_new_group()
        self.actual_optimizer.add_param_group(param_group)
        added_group: dict[str, Any] = groups_as_text(self.actual_optimizer, first=len(self.param_groups) - 1)
        self.comm.agree("add_param_group", **added_group)
        count = len(self.param_groups[-1]["params"])
        added = self._collection.gradients()[-count:]
        self._bcast_parameters(added)
        # Only these: a parameter of another group that was unfrozen meanwhile becomes rank 0's at the next step.
        self._collection.keep_trainable(added)
        self._reducer.after_new_group()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._reducer.discard()
        self._synchronized.forget()
        for guard in self._guards:
            guard.cleared()
        self.actual_optimizer.zero_grad(set_to_none=set_to_none)

    # -- stepping ----------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:  # type: ignore[override]
        """Take the mean of the gradients over ranks, unless `synchronize` did, and step.

        weight: the number of samples in this rank's batch, where ranks may have different numbers; the mean is
        then the gradient of the mean loss over all samples. Every rank gives one, or none does.
        With a `closure` (LBFGS), its loss is averaged over ranks too, so that all ranks search the same line.
        """
        if self._reducer.holding:
            raise ArgumentError(f"rank {self.comm.rank} of {self.comm.size}: step inside no_sync: leave it first")
        if closure is not None:
            self._reducer.refuse("step with a closure")
            return self._update(self._averaging(closure, weight))
        if "found_inf" in self.__dict__:  # a GradScaler calls: it leaves this here, and takes it away again
            self._reducer.refuse("step with a GradScaler")
            return self._step_scaled()
        return self._update() if self._have_mean(weight) else None

    def synchronize(self, weight: float | None = None) -> None:
        """Replace every gradient by its mean over ranks now; the next `step` does not do it again.

        A `backward` after this adds this rank's own gradients, and the next `step` takes the mean once more,
        which leaves what was a mean already as it is.
        """
        self._reducer.refuse("synchronize")
        self._take_mean(self._collection.gradients(), weight)
        self._synchronized.remember(self._collection.gradients())

    def flush(self) -> None:
        """Apply what is still on its way: nothing, or with double buffering the last gradients."""
        if self._install(self._reducer.flush()):
            self._update()

    def weigh(self, loss: Tensor, samples: float) -> Tensor:
        """This rank's mean loss over `samples`, weighed before `backward` so that the plain `step()` is exact.

        The way for unequal batches in models whose layers communicate (multi-node batch normalisation): their
        gradients have mixed over ranks when `step(weight=...)` could weigh them. Every rank must call it.
        """
        return loss * gradients.fair_share(self.comm, samples)

    def _have_mean(self, weight: float | None) -> bool:
        """Take the mean of the gradients, unless `synchronize` did; False if it has not arrived yet."""
        grads = self._collection.gradients()
        if self._synchronized.are(grads):
            # A rank that ran another backward since would take its mean with the others' next gradients.
            self.comm.agree("optimizer step after synchronize")
            arrived = True
        else:
            arrived = self._take_mean(grads, weight)
        self._synchronized.forget()
        return arrived

    @uncompiled
    def _take_mean(self, grads: list[Gradient], weight: float | None) -> bool:
        """Replace every gradient by its mean over ranks; False if it has not arrived yet."""
        agreement = self._agree(grads, weight)
        return self._install(self._reducer.reduce(grads, agreement))

    def _install(self, means: list[Gradient] | None) -> bool:
        for grad in means or ():
            grad.parameter.grad = grad.value
        return means is not None

    def _agree(self, grads: list[Gradient], weight: float | None) -> gradients.Agreement:
        """What ranks must know of each other's gradients before they are averaged; also brings new parameters in."""
        unfrozen = self._collection.unfrozen(grads)
        agreement = self._reducer.agree(grads, weight, self._facts(grads, unfrozen))
        if agreement.statements is not None:
            for guard, statements in zip(self._stating, agreement.statements, strict=True):
                guard.check(statements, grads)
        if grads and agreement.kinds is not None and not any(agreement.kinds):
            self._warn_of_no_gradients()
        if not agreement.equal and self._model is not None:
            crossing = [n for n, m in self._model.named_modules() if getattr(m, "gradients_cross_ranks", False)]
            if crossing:
                raise ArgumentError(
                    f"rank {self.comm.rank} of {self.comm.size}: step(weight=...) with unequal weights, but the "
                    f"gradients of {', '.join(crossing)} have crossed ranks already in backward: use "
                    "optimizer.weigh(loss, samples).backward() and then step()"
                )
        if unfrozen:  # they may have been changed meanwhile
            self._bcast_parameters(unfrozen)
        self._collection.keep_trainable()
        return agreement

    def _warn_of_no_gradients(self) -> None:
        if not self._warned and self.comm.rank == 0:
            warnings.warn(
                "step: no parameter of this optimizer has a gradient on any rank, so nothing changes. Was backward "
                "called? Was the model replaced (create_mnbn_model, parallelize) after its parameters were given here?",
                stacklevel=7,  # who called step
            )
        self._warned = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which `backward` only adds up this rank's gradients, and `step` is a mistake."""
        around, self._reducer.holding = self._reducer.holding, True
        try:
            yield
        finally:
            self._reducer.holding = around

    def _averaging(self, closure: Callable[[], Any], weight: float | None) -> Callable[[], Any]:
        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._have_mean(weight)
            if loss is None:  # fine for optimizers that do not look at it
                return None
            value = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss))
            if weight is None:
                return self.comm.allreduce(value, "mean")
            samples = value.new_full(value.shape, float(weight), dtype=torch.float64)
            # With no samples the mean loss of a rank is 0/0, and 0 times that is not 0.
            weighted = value.double() * samples if weight else torch.zeros_like(samples)
            total, count = self.comm.allreduce(torch.stack([weighted, samples]))
            return (total / count).to(value.dtype)

        return averaged

    def _step_scaled(self) -> Any:
        """A step that a GradScaler asked for: undo its scale, and skip if a gradient overflowed."""
        scale, found_inf = self.__dict__["grad_scale"], self.__dict__["found_inf"]
        problem = None
        if not self._synchronized.cover(self._collection.gradients()):
            # The scaler has looked for overflows already, at this rank's gradients only: ranks would part ways.
            problem = "call optimizer.synchronize() between backward and scaler.unscale_ or scaler.step"
        overflow = bool(found_inf.item())
        # They differ where unscale_ came before synchronize, or where ranks began with other scales.
        same = {"scale": None if scale is None else float(scale), "overflow found": overflow}
        self.comm.agree("optimizer step with a GradScaler", problem, **same)
        self._synchronized.forget()
        if overflow:
            return None
        if scale is not None:
            values = [grad.value for grad in self._collection.gradients() if grad.value is not None]
            foreach_mul_(values, float(scale.double().reciprocal()))
        return self._update()

    # -- what this rank knows ----------------------------------------------------------------------------------

    def _facts(self, grads: list[Gradient], unfrozen: list[Gradient]) -> Facts:
        """What ranks compare beside their gradients, so that their models cannot drift apart."""
        same: dict[str, Any] = {"unfrozen": tuple([grad.name for grad in unfrozen])}
        for guard in self._comparing:
            same |= guard.same(grads)
        return Facts(same, tuple([guard.differ(grads) for guard in self._stating]))

    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        try:
            return super()._update(closure)
        finally:
            for guard in self._watching:
                guard.stepped()

    def state_dict(self) -> dict[str, Any]:
        self._reducer.refuse("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, the same on every rank; one that only some have loaded is found by the next step."""
        self._reducer.refuse("load_state_dict")  # what is on its way would be applied to what was loaded
        super().load_state_dict(state_dict)
        for guard in self._guards:
            guard.loaded()

    def _bcast_at_first(self, model: nn.Module | None) -> None:
        """Rank 0's values of all parameters, and of the model's buffers, each once."""
        named = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
        known = {id(x) for _, x in named}
        named += [
            (grad.name, grad.parameter) for grad in self._collection.gradients() if id(grad.parameter) not in known
        ]
        bcast_tensors(self.comm, list(_shared(named)), OPERATION)

    def _bcast_parameters(self, grads: list[Gradient]) -> None:
        """Rank 0's values of the parameters of these."""
        named = [(grad.name, grad.parameter) for grad in grads]
        bcast_tensors(self.comm, list(_shared(named)), OPERATION)


def _shared(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Without the slices that are a rank's own: they were cut from the same tensor, and must not become rank 0's."""
    return ((name, x) for name, x in named if role_of(x).over is None)


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
    """`actual_optimizer`, stepping with the mean of all ranks' gradients. Every rank must call it.

    comm: all ranks that train together, or the grid of a parallel model.
    Rank 0's parameters reach all ranks now, and with `model` its buffers too.
    double_buffering: step k applies the gradients of step k-1 while those of k travel; `flush()` at the end.
    overlap: gradients travel while backward computes: worth a try on a network or with GPUs; the numbers are the same.
    zero_fill: a gradient that only some ranks have counts as zeros on the others; False makes it an error.
    grad_dtype: torch.float16 or torch.bfloat16 to send gradients compressed; they are summed in float32.
    """
    if isinstance(comm, ProcessGrid):
        comm = comm.comm
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"create_multi_node_optimizer: expected a communicator, got {type(comm).__name__}")
    options = {
        "double_buffering": bool(double_buffering),
        "overlap": bool(overlap),
        "zero_fill": bool(zero_fill),
        "grad_dtype": comm.settings.grad_dtype if grad_dtype is None else grad_dtype,
    }
    check(actual_optimizer, comm, model, options)
    reducer = Delayed if double_buffering else Overlapped if overlap else Immediate
    return MultiNodeOptimizer(actual_optimizer, comm, model, zero_fill, grad_dtype, reducer)
