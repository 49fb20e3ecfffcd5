"""Reducers: when gradients are averaged over ranks. At the step, during backward, or one step later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor

from torchmn._torch_compat import ProfilerRange
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.optim.gradients import Gradient, GradientAverager, GradientCollection, StepAgreement, StepFingerprint


class Reducer(Protocol):
    """Averages the gradients of a multi-node optimizer. All ranks call the same methods in the same order.

    Attributes:
        no_sync: whether gradients are only accumulated, and not averaged.
    """

    no_sync: bool

    def check_supported(self, what: str) -> None:
        """Raises if this reducer does not support `what`: "step with a closure", "synchronize", ..."""

    def check_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        """Raises if gradients of these parameters must not be clipped now."""

    def agree(self, grads: list[Gradient], weight: float | None, fingerprint: StepFingerprint) -> StepAgreement:
        """Compares gradients and fingerprints over ranks, before gradients are averaged."""
        ...

    def reduce(self, grads: list[Gradient], agreement: StepAgreement) -> list[Gradient] | None:
        """Returns gradients whose values replace those of their parameters; None if there are no means yet."""
        ...

    def flush(self) -> list[Gradient] | None:
        """Waits for means that are not complete yet, and returns them."""
        ...

    def discard(self) -> None:
        """Called before gradients are set to zero: waits for those that are being sent."""

    def before_new_group(self) -> None:
        """Called before parameters are added."""

    def after_new_group(self) -> None:
        """Called after parameters were added."""


class ImmediateReducer:
    """Averages gradients at the step."""

    def __init__(self, collection: GradientCollection, comm: Communicator, zero_fill: bool, dtype: torch.dtype | None):
        self.collection = collection
        self.comm = comm
        self.zero_fill = zero_fill
        self.dtype = dtype
        self.no_sync = False
        self._averager = GradientAverager(comm, zero_fill, dtype, "optimizer step")

    def check_supported(self, what: str) -> None:
        pass

    def check_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        pass

    def agree(self, grads: list[Gradient], weight: float | None, fingerprint: StepFingerprint) -> StepAgreement:
        return self._averager.agree(grads, weight, fingerprint)

    def reduce(self, grads: list[Gradient], agreement: StepAgreement) -> list[Gradient] | None:
        return self._averager.take_mean(grads, agreement)

    def flush(self) -> list[Gradient] | None:
        return None

    def discard(self) -> None:
        pass

    def before_new_group(self) -> None:
        pass

    def after_new_group(self) -> None:
        pass


_NOT_SUPPORTED_WITH_DELAY = {
    "step with a closure": "a closure needs this step's gradients now; use double_buffering=False",
    "step with a GradScaler": "a GradScaler needs this step's gradients now; use double_buffering=False",
    "synchronize": "the means of this step's gradients are not complete; use double_buffering=False",
}


class DelayedReducer(ImmediateReducer):
    """Double buffering: step k applies the means of step k-1, while the gradients of step k are averaged.

    The first step only starts averaging; `flush` returns the last means.
    """

    def __init__(self, collection: GradientCollection, comm: Communicator, zero_fill: bool, dtype: torch.dtype | None):
        super().__init__(collection, comm, zero_fill, dtype)
        background = background_communicator(comm, collection.gradients(), "double_buffering")
        self._background_averager = GradientAverager(background, zero_fill, dtype, "optimizer step")
        self._pending: BackgroundReducer | None = None

    def check_supported(self, what: str) -> None:
        problem = _NOT_SUPPORTED_WITH_DELAY.get(what)
        if self._pending is not None and what in ("state_dict", "load_state_dict"):
            problem = f"the last gradients were not applied: call flush() before {what}()"
        if problem is not None:
            raise ArgumentError(f"double_buffering: {problem}")

    def reduce(self, grads: list[Gradient], agreement: StepAgreement) -> list[Gradient] | None:
        means = self.flush()
        sent = [Gradient(grad.name, grad.parameter, grad.value, grad.over) for grad in grads]
        for grad in grads:
            grad.parameter.grad = None  # the user may zero gradients in place, but not those that are being sent
        self._pending = BackgroundReducer(lambda grads: self._background_averager.take_mean(grads, agreement))
        self._pending.submit(sent)
        self._pending.close()
        return means

    def flush(self) -> list[Gradient] | None:
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None


class OverlappedReducer(ImmediateReducer):
    """Averages each bucket of gradients as soon as backward has computed it; the numbers are the same.

    Buckets are sent in the same order on all ranks. `reduce` and `discard` send those that backward did not complete,
    and wait for all.
    """

    bucket_bytes = 4 << 20  # a larger bucket needs fewer messages, a smaller one is sent earlier

    def __init__(self, collection: GradientCollection, comm: Communicator, zero_fill: bool, dtype: torch.dtype | None):
        super().__init__(collection, comm, zero_fill, dtype)
        self._background = background_communicator(comm, collection.gradients(), "overlap")
        self._hooks: list[Any] = []
        self._assign_buckets()

    def _assign_buckets(self) -> None:
        """Assigns parameters to buckets, the last first: backward computes gradients in this order."""
        for hook in self._hooks:
            hook.remove()
        self._buckets: list[list[Gradient]] = [[]]
        filled = 0
        for grad in reversed(self.collection.gradients()):
            if filled >= self.bucket_bytes:
                self._buckets.append([])
                filled = 0
            self._buckets[-1].append(Gradient(grad.name, grad.parameter, None, grad.over))
            filled += grad.parameter.nbytes
        name = "mean of a bucket of gradients"
        self._averagers = [GradientAverager(self._background, self.zero_fill, self.dtype, name) for _ in self._buckets]
        self._bucket_of = {id(grad.parameter): place for place, bucket in enumerate(self._buckets) for grad in bucket}
        watched = [grad.parameter for bucket in self._buckets for grad in bucket if grad.parameter.requires_grad]
        on_gradient = WeakMethod(self._on_gradient)  # the hooks must not keep a deleted optimizer alive

        def hook(parameter: Tensor) -> None:
            if (method := on_gradient()) is not None:
                method(parameter)

        self._hooks = [parameter.register_post_accumulate_grad_hook(hook) for parameter in watched]
        self._watched = {id(parameter) for parameter in watched}
        self._reset()

    def _reset(self) -> None:
        """Prepares for the next backward."""
        self._missing = [{id(g.parameter) for g in bucket} & self._watched for bucket in self._buckets]
        self._sent = 0  # number of buckets that were sent
        self._started = False
        self._pending: BackgroundReducer | None = None

    def before_new_group(self) -> None:
        if self._started:
            self.comm.agree("add_param_group after a backward without a step")
            for grad in self._finish_all():  # `step` may average them again: the mean of means is the same
                grad.put_back()

    def after_new_group(self) -> None:
        self._assign_buckets()

    def discard(self) -> None:
        if self._started:  # a backward without a step
            self.comm.agree("zero_grad after a backward without a step")
            self._finish_all()

    def check_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        if self._started and any(id(parameter) in self._bucket_of for parameter in parameters):
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.size}: overlap: {function} while gradients are being "
                "averaged: call optimizer.synchronize() between backward and clipping"
            )

    @uncompiled
    def _on_gradient(self, parameter: Tensor) -> None:
        """Called by backward when a gradient is complete."""
        if self.no_sync:
            return
        if not self._started and self.collection.trainable() != self._watched:
            self._assign_buckets()  # a parameter was unfrozen
        missing = self._missing[self._bucket_of[id(parameter)]]
        if self._started and id(parameter) not in missing:
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.size}: overlap: a second backward before step, while the "
                "gradients of the first are being averaged: run all but the last one inside `with optimizer.no_sync():`"
            )
        self._started = True
        missing.discard(id(parameter))
        self._send_buckets(complete_only=True)

    def _send_buckets(self, complete_only: bool) -> None:
        while self._sent < len(self._buckets) and not (complete_only and self._missing[self._sent]):
            if self._pending is None:
                self._pending = BackgroundReducer(self._mean_of_bucket)
            self._pending.submit(
                [Gradient(g.name, g.parameter, g.parameter.grad, g.over) for g in self._buckets[self._sent]]
            )
            self._sent += 1
            if self._sent == len(self._buckets):
                self._pending.close()

    def _mean_of_bucket(self, grads: list[Gradient]) -> None:
        averager = self._averagers[self._bucket_of[id(grads[0].parameter)]]
        averager.take_mean(grads, averager.agree(grads, None))

    def agree(self, grads: list[Gradient], weight: float | None, fingerprint: StepFingerprint) -> StepAgreement:
        problem = None
        if weight is not None:
            problem = (
                "step(weight=...) with overlap: gradients are averaged before step gets the weight; use "
                "optimizer.weigh(loss, samples).backward() and then step()"
            )
        statements = self.comm.agree("optimizer step", problem, differ=fingerprint.differ, **fingerprint.same)
        return StepAgreement(None, 1.0 / self.comm.size, statements=list(zip(*statements, strict=True)))

    def reduce(self, grads: list[Gradient], agreement: StepAgreement) -> list[Gradient] | None:
        return self._finish_all()

    def _finish_all(self) -> list[Gradient]:
        self._send_buckets(complete_only=False)
        pending = self._pending
        self._reset()
        return pending.result() if pending else []


class BackgroundReducer(threading.Thread):
    """Averages buckets of gradients in the order in which they were submitted, while the main thread computes."""

    def __init__(self, take_mean: Callable[[list[Gradient]], object]):
        super().__init__(name="torchmn gradients", daemon=True)
        self._take_mean = take_mean
        self._submitted: SimpleQueue[list[Gradient] | None] = SimpleQueue()
        self._means: list[Gradient] = []
        self._error: BaseException | None = None
        self.start()

    def submit(self, grads: list[Gradient]) -> None:
        """Submits a bucket, whose gradients must not be used until `result`."""
        self._submitted.put(grads)

    def close(self) -> None:
        """Ends the thread after the buckets that were submitted."""
        self._submitted.put(None)

    def run(self) -> None:
        try:
            while (grads := self._submitted.get()) is not None:
                self._take_mean(grads)
                self._means += grads
        except BaseException as error:  # raised in `result`
            self._error = error

    def result(self) -> list[Gradient]:
        """Waits for the means of all buckets, after `close`; raises what the thread raised."""
        with ProfilerRange("torchmn::gradient mean in the background"):  # its own thread has no profiler
            self.join()
        if self._error is not None:
            raise self._error
        return self._means


def background_communicator(comm: Communicator, grads: list[Gradient], option: str) -> Communicator:
    """Returns a communicator of the same ranks for a thread, whose operations must not mix with the user's.

    Args:
        comm: communicator of the optimizer.
        grads: of the optimizer.
        option: that needs the thread.

    Raises:
        ArgumentError: if some gradients are slices that are averaged over fewer ranks.
    """
    sliced = [grad.name for grad in grads if (among := role_of(grad.parameter).over) and among.size > 1]
    if sliced:
        raise ArgumentError(
            f"{option}: {', '.join(sliced)} are slices that are averaged over fewer ranks; use {option}=False"
        )
    background = comm.split(0, comm.rank)
    assert background is not None
    return background
