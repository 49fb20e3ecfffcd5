"""A line between all ranks that is not the transport: what one says, all hear, in the same order.

Rank 0 serves it on a port of its host; each rank keeps one connection. It carries nothing while all is well.
A connection that breaks tells that a rank was lost, even one that was killed.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

_BROKEN = (EOFError, OSError)


class Server:
    """Repeats every rank's words to all ranks. Lives in rank 0's process."""

    def __init__(self, host: str, size: int):
        self.key = os.urandom(16)
        self._listener = Listener((host, 0), backlog=size, authkey=self.key)
        self.port: int = self._listener.address[1]  # type: ignore[assignment,index]
        self._ranks: dict[Connection, int] = {}
        self._said: list[bytes] = []  # kept for ranks that are let in later than others speak, and even leave
        self._size = size
        self._newcomers: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for target, name in ((self._accept, "torchmn doorman"), (self._serve, "torchmn switchboard")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def _accept(self) -> None:
        accepted = 0
        while accepted < self._size:
            with suppress(Exception):  # a stranger at the port, or one who does not know the key
                self._newcomers.put(self._listener.accept())
                accepted += 1
        self._listener.close()

    def _serve(self) -> None:
        while True:
            while not self._newcomers.empty():
                self._let_in(self._newcomers.get())
            for line in wait(list(self._ranks), timeout=0.5 if len(self._ranks) < self._size else None):
                self._hear(line)  # type: ignore[arg-type]

    def _let_in(self, line: Connection) -> None:
        self._ranks[line] = -1
        for words in self._said:
            _tell(line, words)

    def _hear(self, line: Connection) -> None:
        try:
            words = line.recv_bytes()
        except _BROKEN:
            rank = self._ranks.pop(line)
            self._repeat(json.dumps({"kind": "lost", "rank": rank}).encode())
            return
        if self._ranks[line] == -1:
            self._ranks[line] = json.loads(words)["rank"]
            return
        self._repeat(words)

    def _repeat(self, words: bytes) -> None:
        self._said.append(words)
        for line in self._ranks:
            _tell(line, words)


def _tell(line: Connection, words: bytes) -> None:
    with suppress(*_BROKEN):  # its own turn to be found broken comes
        line.send_bytes(words)


class Line:
    """One rank's connection to the switchboard."""

    def __init__(self, rank: int, host: str, port: int, key: bytes):
        self._connection = Client((host, port), authkey=key)
        self._lock = threading.Lock()
        self.say({"rank": rank})

    def say(self, words: dict[str, Any]) -> bool:
        """Tell all ranks, this one too; False if the line is dead."""
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(words).encode())
        except _BROKEN:
            return False
        return True

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """The next words, or None if nobody spoke for so long. Raises EOFError or OSError on a dead line."""
        if not self._connection.poll(seconds):
            return None
        return json.loads(self._connection.recv_bytes())
