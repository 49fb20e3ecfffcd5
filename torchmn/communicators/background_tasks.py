"""BackgroundTasks: work in threads of a rank that its communicator waits for before it is closed."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator

from torchmn.errors import TorchMNError


class BackgroundTasks:
    """The tasks of one rank that have not ended, or whose failure was not raised, in the order of their start.

    Args:
        rank: text for messages, "rank 0 of 2".
    """

    def __init__(self, rank: str):
        self.rank = rank
        self._tasks: list[BackgroundTask] = []

    def __iter__(self) -> Iterator[BackgroundTask]:
        return iter(list(self._tasks))  # a task that is closed meanwhile leaves the list

    def start(self, name: str, work: Callable[[], object], raises: type[TorchMNError]) -> BackgroundTask:
        """Starts a task; all ranks must start it, so that each can raise the failure of another.

        Args:
            name: of the operation, for messages.
            work: must not use communicators, whose operations belong to the main thread.
            raises: the exception that all ranks raise if the work of one fails.
        """
        task = BackgroundTask(self, name, work, raises)
        self._tasks.append(task)
        task.start()
        return task

    def finish(self) -> None:
        """Waits for all tasks; raises the first failure that was not raised yet."""
        for task in self:
            task.join()
        failed = [task for task in self if task.failure is not None]
        texts = [task.text for task in failed]
        self.close()
        if failed:
            raise failed[0].raises("\n".join(texts))

    def close(self) -> None:
        """Ignores all failures from now on: this rank has raised another exception."""
        for task in self:
            task.close()

    def remove(self, task: BackgroundTask) -> None:
        """Forgets a task that has ended, and whose failure was raised."""
        if task in self._tasks:
            self._tasks.remove(task)


class BackgroundTask:
    """A function that runs in a thread. Create it with `BackgroundTasks.start`.

    A failure is raised once: by `result`, by a guard of the next optimizer step, or when the communicator is closed. If
    the process ends before, it prints the failure and has exit status 1. Python waits for the thread before it ends.
    """

    def __init__(
        self, tasks: BackgroundTasks, name: str, work: Callable[[], object], raises: type[TorchMNError]
    ) -> None:
        self.name = name
        self.raises = raises
        self._tasks = tasks
        self._work = work
        self._failure: Exception | None = None
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"torchmn-{name}")

    @property
    def failure(self) -> Exception | None:
        """The failure that was not raised yet; None as long as the function runs."""
        return None if self._closed else self._failure

    @property
    def text(self) -> str:
        """The failure as an error message, with rank and operation."""
        return f"{self._tasks.rank}: {self.name}: {self.failure}"

    def start(self) -> None:
        """Starts the thread."""
        atexit.register(self._report_at_exit)
        try:
            self._thread.start()
        except RuntimeError:  # Python is ending, or there are too many threads
            self._run()

    def join(self) -> None:
        """Waits for the function to end."""
        if self._thread.ident is not None:
            self._thread.join()

    def result(self) -> None:
        """Waits for the function to end; raises its failure, unless that was raised before."""
        self.join()
        failure = self.failure
        self.close()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Ignores a failure from now on: it was raised."""
        self._closed = True
        self._tasks.remove(self)
        atexit.unregister(self._report_at_exit)

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # of any type: the main thread must raise it
            self._failure = error

    def _report_at_exit(self) -> None:
        if self.failure is not None and self._process == os.getpid():
            sys.stderr.write(f"torchmn: {self.text}\n")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # a loss must not look like success, and an exit handler cannot raise
