"""BackgroundReducer: a thread that averages gradients over ranks while the main thread computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from torchmn._torch_compat import ProfilerRange
from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.gradient_role import role_of
from torchmn.optim.gradients import Gradient


class BackgroundReducer(threading.Thread):
    """Averages buckets of gradients one after the other, in the order in which they were submitted."""

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
