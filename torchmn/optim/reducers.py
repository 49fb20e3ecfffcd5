"""When gradients become means over ranks: at the step, while backward computes, or one step later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.optim import gradients
from torchmn.optim.background_reducer import Journey, line_of_its_own
from torchmn.optim.gradients import Agreement, Collection, Facts, Gradient


class Reducer(Protocol):
    """What a multi-node optimizer asks for. All ranks call the same methods in the same order.

    Attributes:
        holding: inside `no_sync`, where gradients are added up and nothing travels.
    """

    holding: bool

    def refuse(self, what: str) -> None:
        """Raises if the optimizer cannot do `what` with this reducer: "step with a closure", "synchronize", ..."""

    def refuse_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        """Raises if gradients of these parameters must not be clipped now."""

    def agree(self, grads: list[Gradient], weight: float | None, facts: Facts) -> Agreement:
        """Returns what all ranks know of each other's gradients before they are averaged."""
        ...

    def reduce(self, grads: list[Gradient], agreement: Agreement) -> list[Gradient] | None:
        """Returns gradients whose values are means over ranks; None if there are none yet."""
        ...

    def flush(self) -> list[Gradient] | None:
        """Returns the means that are still on their way."""
        ...

    def discard(self) -> None:
        """Called before gradients are set to zero: what is on its way must not be written over."""

    def before_new_group(self) -> None:
        """Called before parameters are added."""

    def after_new_group(self) -> None:
        """Called after parameters were added."""


class Immediate:
    """Takes the mean at the step."""

    def __init__(self, collection: Collection, comm: Communicator, zero_fill: bool, dtype: torch.dtype | None):
        self.collection = collection
        self.comm = comm
        self.zero_fill = zero_fill
        self.dtype = dtype
        self.holding = False

    def refuse(self, what: str) -> None:
        pass

    def refuse_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        pass

    def agree(self, grads: list[Gradient], weight: float | None, facts: Facts) -> Agreement:
        return gradients.agree(self.comm, grads, weight, self.zero_fill, "optimizer step", facts)

    def reduce(self, grads: list[Gradient], agreement: Agreement) -> list[Gradient] | None:
        gradients.take_mean(self.comm, grads, agreement, self.dtype)
        return grads

    def flush(self) -> list[Gradient] | None:
        return None

    def discard(self) -> None:
        pass

    def before_new_group(self) -> None:
        pass

    def after_new_group(self) -> None:
        pass


_REFUSED_WITH_DELAY = {
    "step with a closure": "a closure needs this step's gradients now; use double_buffering=False",
    "step with a GradScaler": "a GradScaler looks at this step's gradients; use double_buffering=False",
    "synchronize": "this step's gradients are still on their way; use double_buffering=False",
}


class Delayed(Immediate):
    """Double buffering: step k gets the means of step k-1, while the gradients of step k travel.

    The first step only sends; `flush` gets the last ones, so that nothing is lost.
    """

    def __init__(self, collection: Collection, comm: Communicator, zero_fill: bool, dtype: torch.dtype | None):
        super().__init__(collection, comm, zero_fill, dtype)
        self._background = line_of_its_own(comm, collection.gradients(), "double_buffering")
        self._journey: Journey | None = None

    def refuse(self, what: str) -> None:
        if what in _REFUSED_WITH_DELAY:
            raise ArgumentError(f"double_buffering: {_REFUSED_WITH_DELAY[what]}")
        if self._journey is not None and what in ("state_dict", "load_state_dict"):
            raise ArgumentError(f"double_buffering: gradients are still on their way: call flush() before {what}()")

    def reduce(self, grads: list[Gradient], agreement: Agreement) -> list[Gradient] | None:
        arrived = self.flush()
        sent = [Gradient(grad.name, grad.parameter, grad.value, grad.over) for grad in grads]
        for grad in grads:
            grad.parameter.grad = None  # the user may zero gradients in place: those under way must not change
        self._journey = Journey(lambda grads: gradients.take_mean(self._background, grads, agreement, self.dtype))
        self._journey.send(sent)
        self._journey.end()
        return arrived

    def flush(self) -> list[Gradient] | None:
        journey, self._journey = self._journey, None
        return journey.arrive() if journey is not None else None


class Overlapped(Immediate):
    """Takes the mean of each bucket of gradients as soon as backward has computed it; the numbers stay the same.

    Buckets leave in one order on all ranks. `reduce` and `discard` let those leave that backward did not complete, and
    wait for all.
    """

    bucket_bytes = 4 << 20  # a bucket is full when it holds this much: worth its messages, and still early to leave

    def __init__(self, collection: Collection, comm: Communicator, zero_fill: bool, dtype: torch.dtype | None):
        super().__init__(collection, comm, zero_fill, dtype)
        self._background = line_of_its_own(comm, collection.gradients(), "overlap")
        self._hooks: list[Any] = []
        self._fill_buckets()

    def _fill_buckets(self) -> None:
        """Divide the parameters, the last first: in this order backward comes to them."""
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

    def before_new_group(self) -> None:
        if self._begun:
            self.comm.agree("add_param_group after a backward without a step")
            for grad in self._wait_for_all():  # the mean of a mean is the same: `step` may take it once more
                grad.put_back()

    def after_new_group(self) -> None:
        self._fill_buckets()

    def discard(self) -> None:
        if self._begun:  # a backward without a step
            self.comm.agree("zero_grad after a backward without a step")
            self._wait_for_all()

    def refuse_clipping(self, function: str, parameters: Sequence[Tensor]) -> None:
        if self._begun and any(id(parameter) in self._bucket_of for parameter in parameters):
            raise ArgumentError(
                f"rank {self.comm.rank} of {self.comm.size}: overlap: {function} while gradients are on their way to "
                "their means: call optimizer.synchronize() between backward and clipping"
            )

    @uncompiled
    def _computed(self, parameter: Tensor) -> None:
        """Called by backward when a gradient is complete."""
        if self.holding:
            return
        if not self._begun and self.collection.trainable() != self._watched:
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
            self._journey.send(
                [Gradient(g.name, g.parameter, g.parameter.grad, g.over) for g in self._buckets[self._left]]
            )
            self._left += 1
            if self._left == len(self._buckets):
                self._journey.end()

    def _mean_of_bucket(self, grads: list[Gradient]) -> None:
        agreement = gradients.agree(self._background, grads, None, self.zero_fill, "mean of a bucket of gradients")
        gradients.take_mean(self._background, grads, agreement, self.dtype)

    def agree(self, grads: list[Gradient], weight: float | None, facts: Facts) -> Agreement:
        problem = None
        if weight is not None:
            problem = (
                "step(weight=...) with overlap: gradients leave before step says their weight; use "
                "optimizer.weigh(loss, samples).backward() and then step()"
            )
        statements = self.comm.agree("optimizer step", problem, differ=facts.differ, **facts.same)
        return Agreement(None, 1.0 / self.comm.size, statements=list(zip(*statements, strict=True)))

    def reduce(self, grads: list[Gradient], agreement: Agreement) -> list[Gradient] | None:
        return self._wait_for_all()

    def _wait_for_all(self) -> list[Gradient]:
        self._let_leave(complete_only=False)
        journey = self._journey
        self._start_over()
        return journey.arrive() if journey else []
