"""Guard against training on after a background task has failed, such as the writing of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from torchmn.optim.events import StepGuard, guard
from torchmn.optim.gradients import Gradient

Failure = tuple[int, int, str]
"""Rank, number of the task, and error message."""


@guard(on="step", why="training would go on for hours although its checkpoints are not written")
class BackgroundFailures(StepGuard):
    """Raises the failure of a background task of any rank on all ranks."""

    def differ(self, grads: list[Gradient]) -> Failure | None:
        comm = self.watched.comm
        for number, task in enumerate(comm.background):
            if task.failure is not None:
                failure = (comm.rank, number, task.text)
                if comm.size == 1:
                    self._raise([failure])
                return failure
        return None

    def check(self, statements: Sequence[Failure | None], grads: list[Gradient]) -> None:
        failures = [failure for failure in statements if failure is not None]
        if failures:
            self._raise(failures)

    def _raise(self, failures: Sequence[Failure]) -> None:
        comm = self.watched.comm
        tasks = list(comm.background)
        for _, number, _ in failures:
            tasks[number].close()
        raise tasks[failures[0][1]].raises("\n".join(text for *_, text in failures))
