"""How long the process of a rank takes to end after its script: `ProgramEnd`."""

from __future__ import annotations

import threading
from time import monotonic

from torchmn.communicators.watchdog import report
from torchmn.communicators.watchdog.source_lines import line_of_thread
from torchmn.communicators.watchdog.waits import Watch


class ProgramEnd:
    """Measures the time since the script of a rank ended, for the watchdog: Python may wait for threads for ever.

    Attributes:
        waits_for_ranks: whether the process waits for other ranks to end, which may take any time.
    """

    def __init__(self, watch: Watch, timeout: float):
        self.waits_for_ranks = False
        self._watch = watch
        self._limit = timeout
        self._began: float | None = None

    def reason_to_end_job(self) -> str | None:
        """Returns why the job must be ended: the end takes longer than a wait may. None if it does not."""
        if threading.main_thread().is_alive() or self.waits_for_ranks or self._watch.waits:
            self._began = None
            return None
        if self._began is None:
            self._began = monotonic()
        if monotonic() - self._began <= self._limit:
            return None
        return report.exit_reason(self._watch.rank, self._limit, _unfinished(self._watch.main_thread))


def _unfinished(main_thread: int) -> str:
    """Returns what keeps a process from ending after its script: the threads that Python waits for, or an exit handler.

    With the line of each. Python joins threads that are no daemons before it calls exit handlers.
    """
    main = threading.main_thread()
    threads = [each for each in threading.enumerate() if each is not main and not each.daemon and each.ident]
    if not threads:
        return f"the exit handler at {line_of_thread(main_thread)}"
    return ", ".join(f"thread {each.name!r} at {line_of_thread(each.ident or 0)}" for each in threads)
