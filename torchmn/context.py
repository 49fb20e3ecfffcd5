"""State of the running thread (`here`) and of the process (`process`) that belongs to no object of a user.

Ranks may be threads of one process (`run_threads`), so the state of a rank is the state of a thread.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet, ref


class Token:
    """Identifies a thread, and lives as long as the thread."""

    __slots__ = ("__weakref__", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()


class ThreadState(threading.local):
    """State of the current thread. It ends with the thread, unlike the thread's ident, which a new thread may get.

    Attributes:
        mark: a reference to the thread's token.
        watch: the `Watch` of the rank for which this thread has communicated.
        communicator: that `run_threads` created for this rank; None in threads that are no ranks.
        tape: messages of the part of a model that torch.utils.checkpoint computes twice (functions/recomputation.py).
        samples: those that the running forward of a parallel model computes (sharded/sharding.py).
        recorder: of the current dry run (sharded/parameter_use.py).
    """

    watch: Any = None
    communicator: Any = None
    tape: Any = None
    samples: Any = None
    recorder: Any = None

    def __init__(self) -> None:
        self._token = Token()
        self.mark = ref(self._token)


class ProcessState:
    """State that all ranks of this process share.

    Attributes:
        lock: for state that Python, NumPy and torch have once per process, such as random generators. Code of users may
            run while it is held, and start threads.
        numpy_files: lock for reading NumPy's files. Not `lock`: a thread that a user's dataset starts may read some.
        watches: the `Watch` of each rank in this process.
        worlds: number of communicators created by `create_communicator`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numpy_files = threading.Lock()
        self.watches: WeakSet[Any] = WeakSet()
        self.worlds = 0


here = ThreadState()
process = ProcessState()
