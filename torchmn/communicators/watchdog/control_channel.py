"""A line between all ranks that is not the transport: what one says, all hear, in the same order.

Rank 0 serves it on a port of its host; each rank keeps one connection. It carries nothing while all is well.
A connection that breaks tells that a rank was lost, even one that was killed, or whose host was.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from time import monotonic
from typing import Any

from torchmn.communicators.launchers.addresses import LOOPBACK

MEETING_SECONDS = 10.0
_BROKEN = (EOFError, OSError)
# A host that lost its power or its network says nothing. Its connection is given up after a minute without an answer.
_SIGNS_OF_LIFE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}


class Server:
    """Repeats every rank's words to all ranks. Lives in rank 0's process."""

    def __init__(self, size: int, to_other_hosts: bool):
        self.key = os.urandom(16)
        self._door = _open_port(to_other_hosts, size)
        self.port: int = self._door.getsockname()[1]
        self._ranks: dict[Connection, int] = {}
        self._said: list[bytes] = []  # kept for ranks that are let in later than others speak, and even leave
        self._size = size
        self._known = 0
        self._newcomers: queue.SimpleQueue[tuple[Connection, int]] = queue.SimpleQueue()
        for target, name in ((self._accept, "torchmn doorman"), (self._serve, "torchmn switchboard")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                visitor = self._door.accept()[0]
            except ConnectionAbortedError:  # somebody who went before the door was opened
                continue
            except OSError:  # the door is closed behind the last rank
                return
            # Each in a thread of its own: a stranger at the port, who says nothing, must not keep a rank waiting.
            threading.Thread(target=self._meet, args=(visitor,), name="torchmn doorman", daemon=True).start()

    def _meet(self, visitor: socket.socket) -> None:
        with suppress(Exception):  # a stranger, or a rank that has found another way in
            line = _introduced(visitor, self.key, serves=True)
            if line.poll(MEETING_SECONDS):
                self._newcomers.put((line, json.loads(line.recv_bytes())["rank"]))

    def _serve(self) -> None:
        while True:
            while not self._newcomers.empty():
                self._let_in(*self._newcomers.get())
            for line in wait(list(self._ranks), timeout=0.5 if self._known < self._size else None):
                self._hear(line)  # type: ignore[arg-type]

    def _let_in(self, line: Connection, rank: int) -> None:
        self._ranks[line] = rank
        self._known += 1
        if self._known == self._size:
            with suppress(OSError):
                self._door.shutdown(socket.SHUT_RDWR)  # `accept` would not notice `close`
            self._door.close()
        for words in self._said:
            _tell(line, words)

    def _hear(self, line: Connection) -> None:
        try:
            words = line.recv_bytes()
        except _BROKEN:
            rank = self._ranks.pop(line)
            words = json.dumps({"kind": "lost", "rank": rank}).encode()
        self._said.append(words)
        for each in self._ranks:
            _tell(each, words)


def _tell(line: Connection, words: bytes) -> None:
    with suppress(*_BROKEN):  # its own turn to be found broken comes
        line.send_bytes(words)


class Line:
    """One rank's connection to the switchboard, by whichever of rank 0's addresses leads there."""

    def __init__(self, rank: int, addresses: Sequence[str], port: int, key: bytes, seconds: float = MEETING_SECONDS):
        self._connection = _first_to_answer(addresses, port, key, seconds)
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


def _open_port(to_other_hosts: bool, size: int) -> socket.socket:
    """A listening socket on a free port: of all of this host's addresses, or of the loopback interface alone."""
    if not to_other_hosts:
        return socket.create_server((LOOPBACK, 0), backlog=size)
    queued = 16 * size  # every rank calls at several addresses, and whom the queue has no room for calls late again
    with suppress(OSError):  # IPv6 may be built in, but switched off
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=queued)
    return socket.create_server(("", 0), backlog=queued)


def _first_to_answer(addresses: Sequence[str], port: int, key: bytes, seconds: float) -> Connection:
    """A connection to whichever address is the server's. All are tried at once: some may lead nowhere, in silence.

    An address of rank 0's host may be one of this host, too (every docker0 has the same): the key tells who answers.
    """
    answers: queue.SimpleQueue[tuple[str, Connection | str]] = queue.SimpleQueue()

    def call(address: str) -> None:
        try:
            caller = socket.create_connection((address, port), timeout=seconds)
            answers.put((address, _introduced(caller, key, serves=False)))
        except Exception as error:
            answers.put((address, str(error) or type(error).__name__))

    for address in addresses:
        threading.Thread(target=call, args=(address,), name="torchmn caller", daemon=True).start()
    troubles = dict.fromkeys(addresses, "no answer")
    deadline = monotonic() + seconds
    with suppress(queue.Empty):
        for _ in addresses:
            address, answer = answers.get(timeout=max(0.0, deadline - monotonic()))
            if isinstance(answer, Connection):
                return answer  # those that answer later are dropped, and so closed
            troubles[address] = answer
    raise ConnectionError(", ".join(f"{address}: {trouble}" for address, trouble in troubles.items()))


def _introduced(line: socket.socket, key: bytes, serves: bool) -> Connection:
    """The connection of a socket whose other end knows the key, and says so in time."""
    with line:
        line.settimeout(None)
        _limit_reads(line, MEETING_SECONDS)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _SIGNS_OF_LIFE.items():
            if hasattr(socket, name):  # Linux has them all
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection = Connection(os.dup(line.fileno()))
        try:
            first, second = (deliver_challenge, answer_challenge) if serves else (answer_challenge, deliver_challenge)
            first(connection, key)
            second(connection, key)
        except BaseException:
            connection.close()
            raise
        _limit_reads(line, 0.0)
        return connection


def _limit_reads(line: socket.socket, seconds: float) -> None:
    """Let reads fail after so long; 0: never. (A socket's own timeout is for its methods, not for a Connection.)"""
    whole = int(seconds)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))
