"""State of the running thread (`here`) and of the process (`process`) that belongs to no object of a user.

Ranks may be threads of one process (`run_threads`), so the state of a rank is the state of a thread.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        operations: of the running forward of a parallel model (communicators/repeated_operations.py).
        isolated: whether operations that communicate raise, because this rank runs a model that other ranks do not run.
    """

    watch: Any = None
    communicator: Any = None
    tape: Any = None
    samples: Any = None
    recorder: Any = None
    operations: Any = None
    isolated: bool = False

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
        collections: lock for the attributes below.
        pauses: number of `collections_paused` that are entered.
        collects: whether Python collected garbage before the first of them.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numpy_files = threading.Lock()
        self.watches: WeakSet[Any] = WeakSet()
        self.worlds = 0
        self.collections = threading.Lock()
        self.pauses = 0
        self.collects = True


here = ThreadState()
process = ProcessState()


@contextmanager
def collections_paused() -> Iterator[None]:
    """Context without garbage collections of Python, in any thread.

    For code that creates many containers which stay alive: they would set off collections that take longer than the
    code, and find nothing. Keep it short, and do not run code of users in it: their garbage may be large.
    """
    with process.collections:
        process.pauses += 1
        if process.pauses == 1:
            process.collects = gc.isenabled()
            gc.disable()
    try:
        yield
    finally:
        with process.collections:
            process.pauses -= 1
            if process.pauses == 0 and process.collects:
                gc.enable()
