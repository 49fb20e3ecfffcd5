"""interruption: graceful handling of signals, which stop training after the current step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Signals within this many seconds of the first count as one request: Slurm sends SIGTERM twice at the time limit, 5 ms
# apart, and Ctrl-C in a terminal reaches launcher and ranks, where mpiexec and other launchers forward it too.
ONE_REQUEST = 1.0


class Interruption:
    """Whether a signal to stop has been received, which one, and when. Callable: returns whether to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._since = 0.0

    def __call__(self) -> bool:
        return self.signum is not None

    @property
    def is_recent(self) -> bool:
        """Whether another signal now would still be part of the first request."""
        return self.signum is not None and monotonic() - self._since < ONE_REQUEST

    def handle(self, signum: int, frame: object) -> None:
        """Signal handler: records the first request; at the second, ends the program."""
        if self.signum is None:
            self.signum, self._since = signum, monotonic()
        elif not self.is_recent:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Records the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 in the yielded object; the second ends the program as usual.

    Signals that the program ignores (nohup) stay ignored, and a handler that the program has for SIGUSR1 is kept.
    """
    request = Interruption()
    previous = {signum: signal.getsignal(signum) for signum in SIGNALS if _is_handled(signum)}
    for signum in previous:
        signal.signal(signum, request.handle)
    try:
        yield request
    finally:
        # If recent, a repeated signal would end the program while it exits after saving.
        if not request.is_recent:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def _is_handled(signum: signal.Signals) -> bool:
    handler = signal.getsignal(signum)
    return handler == signal.SIG_DFL if signum == signal.SIGUSR1 else handler != signal.SIG_IGN
