"""Ctrl-C as a wish that a training hears at the end of a step, so that it can save what it has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether the user wants to stop."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __call__(self) -> bool:
        return self.signum is not None


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Inside, the first SIGINT or SIGTERM is only noted; the second ends the program as usual."""
    wish = Interruption()
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}

    def note(signum: int, frame: object) -> None:
        if wish.signum is not None:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
        wish.signum = signum

    for signum in SIGNALS:
        signal.signal(signum, note)
    try:
        yield wish
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
