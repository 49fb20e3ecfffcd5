"""A signal as a request that a training answers at the end of a step, so that it can save what it has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Signals within so many seconds of the first are the same request. Slurm sends SIGTERM twice at the time limit, 5 ms
# apart; a terminal's Ctrl-C reaches launcher and ranks, and the launcher passes it on; so does mpiexec.
ONE_REQUEST = 1.0


class Interruption:
    """Whether the user wants to stop, by which signal, and since when."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._since = 0.0

    def __call__(self) -> bool:
        return self.signum is not None

    @property
    def may_be_repeated(self) -> bool:
        """Whether a signal that comes now is still part of the first request."""
        return self.signum is not None and monotonic() - self._since < ONE_REQUEST

    def note(self, signum: int, frame: object) -> None:
        """The handler: notes the first request, and ends the program at the second."""
        if self.signum is None:
            self.signum, self._since = signum, monotonic()
        elif not self.may_be_repeated:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Inside, the first SIGINT, SIGTERM, SIGHUP or SIGUSR1 is only noted; the second ends the program as usual.

    A signal that the program was started to ignore (nohup) stays ignored, and a SIGUSR1 for which the program has a
    handler stays with it.
    """
    wish = Interruption()
    before = {signum: signal.getsignal(signum) for signum in SIGNALS if _is_ours(signum)}
    for signum in before:
        signal.signal(signum, wish.note)
    try:
        yield wish
    finally:
        if not wish.may_be_repeated:  # else the rest of it would end a program that has saved, and is leaving
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _is_ours(signum: signal.Signals) -> bool:
    handler = signal.getsignal(signum)
    return handler == signal.SIG_DFL if signum == signal.SIGUSR1 else handler != signal.SIG_IGN
