"""Double buffering: the gradients of one step travel while the next one is computed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchmn.communicators.base import Communicator
from torchmn.errors import ArgumentError
from torchmn.nn.parts.roles import replicas_of
from torchmn.optim import gradients
from torchmn.optim.gradients import Gradient
from torchmn.optim.multi_node import MultiNodeOptimizer


class _Journey(threading.Thread):
    """Gradients on their way to their mean, in a thread of their own."""

    def __init__(self, grads: list[Gradient], take_mean: Callable[[list[Gradient]], None]):
        super().__init__(name="torchmn gradients", daemon=True)
        self._grads = grads
        self._take_mean = take_mean
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._take_mean(self._grads)
        except BaseException as error:  # raised where the means are asked for
            self._error = error

    def arrive(self) -> list[Gradient]:
        """Wait for the means."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._grads


class DoubleBufferingOptimizer(MultiNodeOptimizer):
    """Step k applies the mean of the gradients of step k-1, while those of step k travel.

    The first step only sends; `flush()` applies the last gradients, so that nothing is lost.
    """

    def __init__(
        self,
        actual_optimizer: Optimizer,
        comm: Communicator,
        model: nn.Module | None = None,
        zero_fill: bool = True,
        grad_dtype: torch.dtype | None = None,
    ):
        super().__init__(actual_optimizer, comm, model, zero_fill, grad_dtype)
        sliced = [grad.name for grad in self._gradients() if replicas_of(grad.parameter) not in (None, comm)]
        if any(replicas_of(grad.parameter) and replicas_of(grad.parameter).size > 1 for grad in self._gradients()):
            raise ArgumentError(
                f"double_buffering: {', '.join(sliced)} are slices that are averaged over fewer ranks; use "
                "double_buffering=False"
            )
        # A thread must not share a communicator with the user's code: their operations would meet out of order.
        background = comm.split(0, comm.rank)
        assert background is not None
        self._background = background
        self._journey: _Journey | None = None

    def step(self, closure: Callable[[], Any] | None = None, *, weight: float | None = None) -> Any:
        """Send this step's gradients on their way, and step with the mean of the last ones."""
        if closure is not None:
            raise ArgumentError(
                "double_buffering: a closure needs this step's gradients now; use double_buffering=False"
            )
        if self._asked_by_scaler():
            raise ArgumentError(
                "double_buffering: a GradScaler looks at this step's gradients; use double_buffering=False"
            )
        grads = self._gradients()
        agreement = self._agree(grads, weight)
        arrived = self._journey.arrive() if self._journey else None
        for grad in grads:
            grad.parameter.grad = None  # the user may zero gradients in place: those under way must not change
        self._journey = _Journey(
            grads, lambda grads: gradients.take_mean(self._background, grads, agreement, self.grad_dtype)
        )
        return self._apply(arrived)

    def flush(self) -> None:
        """Wait for the last gradients and step with them."""
        journey, self._journey = self._journey, None
        if journey is not None:
            self._apply(journey.arrive())

    def synchronize(self, weight: float | None = None) -> None:
        raise ArgumentError(
            "double_buffering: this step's gradients are still on their way; use double_buffering=False"
        )

    def state_dict(self) -> dict[str, Any]:
        if self._journey is not None:
            raise ArgumentError("double_buffering: gradients are still on their way: call flush() before state_dict()")
        return super().state_dict()

    def _apply(self, arrived: list[Gradient] | None) -> Any:
        if arrived is None:
            return None
        for grad in arrived:
            grad.put_back()
        return self.actual_optimizer.step()
