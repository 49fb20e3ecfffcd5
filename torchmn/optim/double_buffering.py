"""Double buffering: the gradients of one step travel while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmn.errors import ArgumentError
from torchmn.optim import gradients
from torchmn.optim.gradients import Gradient
from torchmn.optim.journey import Journey, line_of_its_own
from torchmn.optim.multi_node import MultiNodeOptimizer


class DoubleBufferingOptimizer(MultiNodeOptimizer):
    """Step k applies the mean of the gradients of step k-1, while those of step k travel.

    The first step only sends; `flush()` applies the last gradients, so that nothing is lost.
    """

    def _prepare(self) -> None:
        self._background = line_of_its_own(self.comm, self._gradients(), "double_buffering")
        self._journey: Journey | None = None

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
        self._journey = Journey(lambda grads: gradients.take_mean(self._background, grads, agreement, self.grad_dtype))
        self._journey.send(grads)
        self._journey.end()
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
        self._refuse_under_way("state_dict")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._refuse_under_way("load_state_dict")  # they would be applied to what was loaded
        super().load_state_dict(state_dict)

    def _refuse_under_way(self, method: str) -> None:
        if self._journey is not None:
            raise ArgumentError(f"double_buffering: gradients are still on their way: call flush() before {method}()")

    def _apply(self, arrived: list[Gradient] | None) -> Any:
        if arrived is None:
            return None
        for grad in arrived:
            grad.put_back()
        return self._update()
