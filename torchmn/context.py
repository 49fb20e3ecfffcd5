"""State of the package that belongs to no object that a user holds: of the running thread, and of the process.

Ranks may be threads of one process (`run_threads`), so what belongs to the running rank is the state of a thread.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet, ref


class Token:
    """Stands for a thread, and lives as long as it does."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()


class ThisThread(threading.local):
    """What is noted of the thread that asks. It ends with the thread, whose ident a new thread may get.

    Attributes:
        mark: a reference to the thread's token.
        watch: of the rank for which this thread has communicated.
        communicator: that `run_threads` gave to this rank; None in threads that are no ranks.
        tape: of the part of a model that torch.utils.checkpoint computes twice (functions/recomputation.py).
        samples: that the running forward of a parallel model computes (sharded/sharding.py).
        recorder: of the dry run that is under way (sharded/roles.py).
    """

    watch: Any = None
    communicator: Any = None
    tape: Any = None
    samples: Any = None
    recorder: Any = None

    def __init__(self) -> None:
        self._token = Token()
        self.mark = ref(self._token)


class ThisProcess:
    """What the ranks of this process share.

    Attributes:
        lock: for what Python, NumPy and torch keep once for all threads, such as their random generators. Code of users
            may run while it is held, and start threads.
        numpy_files: for reading NumPy's files. Another lock: a thread that a user's data set starts may read some.
        watches: those of all ranks in this process.
        worlds: how many communicators were created.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numpy_files = threading.Lock()
        self.watches: WeakSet[Any] = WeakSet()
        self.worlds = 0


here = ThisThread()
process = ThisProcess()
