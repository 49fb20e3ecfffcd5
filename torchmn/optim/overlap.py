"""Overlap: gradients travel in buckets while backward still computes those of earlier layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakMethod

from torch import Tensor

from torchmn.communicators.uncompiled import uncompiled
from torchmn.errors import ArgumentError
from torchmn.optim import gradients
from torchmn.optim.gradients import Gradient
from torchmn.optim.journey import Journey, line_of_its_own
from torchmn.optim.multi_node import MultiNodeOptimizer
from torchmn.optim.values import on_some_ranks


class OverlappingOptimizer(MultiNodeOptimizer):
    """Takes the mean of each bucket of gradients as soon as backward has computed it; the numbers stay the same.

    Buckets leave in one order on all ranks. `step`, `synchronize` and `zero_grad` let those leave that backward did
    not complete, and wait for all.
    """

    bucket_bytes = 4 << 20  # a bucket is full when it holds this much: worth its messages, and still early to leave

    def _prepare(self) -> None:
        self._background = line_of_its_own(self.comm, self._gradients(), "overlap")
        self._hooks: list[Any] = []
        self._fill_buckets()

    def _fill_buckets(self) -> None:
        """Divide the parameters, the last first: in this order backward comes to them."""
        for hook in self._hooks:
            hook.remove()
        self._buckets: list[list[Gradient]] = [[]]
        filled = 0
        for grad in reversed(self._gradients()):
            if filled >= self.bucket_bytes:
                self._buckets.append([])
                filled = 0
            self._buckets[-1].append(Gradient(grad.name, grad.parameter, None))
            filled += grad.parameter.nbytes
        self._bucket_of = {id(grad.parameter): place for place, bucket in enumerate(self._buckets) for grad in bucket}
        watched = [grad.parameter for bucket in self._buckets for grad in bucket if grad.parameter.requires_grad]
        computed = WeakMethod(self._computed)  # an optimizer that the user has let go must not send any more

        def tell(parameter: Tensor) -> None:
            if (listener := computed()) is not None:
                listener(parameter)

        self._hooks = [parameter.register_post_accumulate_grad_hook(tell) for parameter in watched]
        self._watched = {id(parameter) for parameter in watched}
        self._start_over()

    def _start_over(self) -> None:
        """Nothing has been computed, nothing has left."""
        self._missing = [{id(g.parameter) for g in bucket} & self._watched for bucket in self._buckets]
        self._left = 0  # how many buckets have
        self._begun = False
        self._journey: Journey | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._begun:
            self._take_mean(None)  # the mean of a mean is the same: `step` may take it once more
        super().add_param_group(param_group)
        self._fill_buckets()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._begun:  # a backward whose gradients nobody wants: they must arrive before they are written over
            self.comm.agree("zero_grad after a backward without a step")
            self._wait_for_all()
        super().zero_grad(set_to_none)

    def refuse_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        if self._begun and any(id(parameter) in self._bucket_of for parameter in parameters):
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.size}: overlap: {function} while gradients are on their way to "
                "their means: call optimizer.synchronize() between backward and clipping"
            )

    @uncompiled
    def _computed(self, parameter: Tensor) -> None:
        """Called by backward when a gradient is complete."""
        if self._holding:
            return
        if not self._begun and self._trainable_now() != self._watched:
            self._fill_buckets()  # or a bucket would leave without a parameter that was unfrozen
        missing = self._missing[self._bucket_of[id(parameter)]]
        if self._begun and id(parameter) not in missing:
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.size}: overlap: a second backward before step, while the "
                "gradients of the first are on their way: run all but the last one inside `with optimizer.no_sync():`"
            )
        self._begun = True
        missing.discard(id(parameter))
        self._let_leave(complete_only=True)

    def _let_leave(self, complete_only: bool) -> None:
        while self._left < len(self._buckets) and not (complete_only and self._missing[self._left]):
            if self._journey is None:
                self._journey = Journey(self._mean_of_bucket)
            self._journey.send([Gradient(g.name, g.parameter, g.parameter.grad) for g in self._buckets[self._left]])
            self._left += 1
            if self._left == len(self._buckets):
                self._journey.end()

    def _mean_of_bucket(self, grads: list[Gradient]) -> None:
        agreement = gradients.agree(self._background, grads, None, self.zero_fill, "mean of a bucket of gradients")
        gradients.take_mean(self._background, grads, agreement, self.grad_dtype)

    def _take_mean(self, weight: float | None) -> None:
        problem = None
        if weight is not None:
            problem = (
                "step(weight=...) with overlap: gradients leave before step says their weight; use "
                "optimizer.weigh(loss, samples).backward() and then step()"
            )
        grads = self._gradients()
        here = self._here(grads)
        told = self.comm.agree("optimizer step", problem, differ=here.written, **here.same())
        self._compare_values(on_some_ranks(told), grads)
        for grad in self._wait_for_all():
            grad.put_back()
        self._bcast_unfrozen(self._gradients())

    def _wait_for_all(self) -> list[Gradient]:
        self._let_leave(complete_only=False)
        journey = self._journey
        self._start_over()
        return journey.arrive() if journey else []
