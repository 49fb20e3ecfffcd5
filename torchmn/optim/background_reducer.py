"""Gradients that travel in a thread of their own, while the rank computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.optim.gradients import Gradient


class Journey(threading.Thread):
    """Buckets of gradients on their way to their means, one after the other in the order in which they were sent."""

    def __init__(self, take_mean: Callable[[list[Gradient]], None]):
        super().__init__(name="torchmn gradients", daemon=True)
        self._take_mean = take_mean
        self._sent: SimpleQueue[list[Gradient] | None] = SimpleQueue()
        self._means: list[Gradient] = []
        self._error: BaseException | None = None
        self.start()

    def send(self, grads: list[Gradient]) -> None:
        """Let a bucket leave; nobody else may touch its gradients until `arrive`."""
        self._sent.put(grads)

    def end(self) -> None:
        """Say that no more buckets come."""
        self._sent.put(None)

    def run(self) -> None:
        try:
            while (grads := self._sent.get()) is not None:
                self._take_mean(grads)
                self._means += grads
        except BaseException as error:  # raised where the means are asked for
            self._error = error

    def arrive(self) -> list[Gradient]:
        """Wait for the means of all that was sent; after `end`."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._means


def line_of_its_own(comm: Communicator, grads: list[Gradient], option: str) -> Communicator:
    """A communicator of the same ranks for a thread: on the user's own, their operations would meet out of order.

    option: which asked for the thread; it is refused where slices are averaged over fewer ranks.
    """
    sliced = [grad.name for grad in grads if (among := role_of(grad.parameter).over) and among.size > 1]
    if sliced:
        raise ArgumentError(
            f"{option}: {', '.join(sliced)} are slices that are averaged over fewer ranks; use {option}=False"
        )
    background = comm.split(0, comm.rank)
    assert background is not None
    return background
