"""A TCP broadcast channel between all ranks, independent of the transport: `ControlServer` and `ControlClient`.

Messages are JSON objects and arrive at every rank in the same order. The server runs in rank 0's process; each rank
keeps one connection to it, idle unless something goes wrong. A broken connection reveals a lost rank, even one that was
killed or whose host failed.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from time import monotonic
from typing import Any

from torchmn.communicators.launchers.addresses import LOOPBACK

CONNECT_SECONDS = 10.0
CUT_OFF = "cannot reach rank 0"  # part of a warning; `torchmn doctor` searches for it in the output
_BROKEN = (EOFError, OSError)
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_SECONDS = 0.1
_MOST_BYTES = 1 << 24  # of one message: the state of a rank with thousands of open edges is below 1 MB
# A host without power or network closes no connection. Keepalive gives such a connection up after about a minute.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}


class ControlServer:
    """Server side, in rank 0's process: forwards each message to all ranks."""

    def __init__(self, size: int, to_other_hosts: bool):
        self.key = os.urandom(16)
        self._listener = _open_port(to_other_hosts, size)
        self.port: int = self._listener.getsockname()[1]
        self._ranks: dict[Connection, int] = {}
        self._log: list[bytes] = []  # all messages: replayed to ranks that connect late
        self._size = size
        self._accepted: set[int] = set()
        self._unknown: dict[socket.socket, None] = {}  # connections that have not introduced themselves, oldest first
        self._most_unknown = 64 + 16 * size  # a rank may connect by several addresses at once
        self._pending: queue.SimpleQueue[tuple[Connection, int]] = queue.SimpleQueue()
        for target, name in ((self._accept, "torchmn-accept"), (self._serve, "torchmn-control-server")):
            threading.Thread(target=target, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno not in _FULL:  # closed, after the last rank
                    return
                time.sleep(_RETRY_SECONDS)  # until this process has closed a file
                continue
            self._unknown[connection] = None
            if len(self._unknown) > self._most_unknown:
                # The oldest one: a rank needs milliseconds to introduce itself.
                with suppress(OSError, StopIteration, RuntimeError):  # it may end at this moment
                    next(iter(self._unknown)).shutdown(socket.SHUT_RDWR)
            # One thread per connection: a client that sends nothing must not delay a rank.
            handshake = threading.Thread(target=self._handshake, args=(connection,), daemon=True)
            handshake.name = "torchmn-handshake"
            try:
                handshake.start()
            except RuntimeError:  # no further thread at the moment
                self._unknown.pop(connection, None)
                connection.close()

    def _handshake(self, connection: socket.socket) -> None:
        with suppress(Exception):  # not a rank, or a rank that connected by another address
            authenticated = _authenticate(connection, self.key, server=True)
            if authenticated.poll(CONNECT_SECONDS):
                self._pending.put((authenticated, json.loads(authenticated.recv_bytes(_MOST_BYTES))["rank"]))
        self._unknown.pop(connection, None)

    def _serve(self) -> None:
        while True:
            while not self._pending.empty():
                self._add(*self._pending.get())
            for connection in wait(list(self._ranks), timeout=0.5 if len(self._accepted) < self._size else None):
                assert isinstance(connection, Connection)
                self._forward(connection)

    def _add(self, connection: Connection, rank: object) -> None:
        if not isinstance(rank, int) or rank not in range(self._size) or rank in self._accepted:
            connection.close()  # the client reports that rank 0 closed the connection
            return
        self._ranks[connection] = rank
        self._accepted.add(rank)
        if len(self._accepted) == self._size:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which `close` does not
            self._listener.close()
        for message in self._log:
            _send(connection, message)

    def _forward(self, connection: Connection) -> None:
        try:
            message = connection.recv_bytes(_MOST_BYTES)
            if parse(message)["rank"] != self._ranks[connection]:
                raise ValueError("a message in the name of another rank")
        except (*_BROKEN, ValueError):
            rank = self._ranks.pop(connection)
            connection.close()
            message = json.dumps({"kind": "lost", "rank": rank}).encode()
        self._log.append(message)
        for each in self._ranks:
            _send(each, message)


def parse(message: bytes) -> dict[str, Any]:
    """Returns the content of a message.

    Raises:
        ValueError: it is not a JSON object with the kind of message and the rank that sent it.
    """
    content = json.loads(message)
    if not isinstance(content, dict) or not isinstance(content.get("kind"), str):
        raise ValueError("expected a JSON object with a kind")
    if not isinstance(content.get("rank"), int):
        raise ValueError("expected a JSON object with a rank")
    return content


def _send(connection: Connection, message: bytes) -> None:
    with suppress(*_BROKEN):  # the next read of this connection reports the rank as lost
        connection.send_bytes(message)


class ControlClient:
    """One rank's connection to the server, by whichever of rank 0's addresses leads there.

    Raises:
        ConnectionError: no address leads to the server; the message names the failure of each.
    """

    def __init__(self, rank: int, addresses: Sequence[str], port: int, key: bytes, seconds: float = CONNECT_SECONDS):
        self._connection = _connect_any(addresses, port, key, seconds)
        self._lock = threading.Lock()
        self.send({"rank": rank})

    def send(self, message: dict[str, Any]) -> bool:
        """Sends a message to all ranks, this one included. Returns False if the connection is broken."""
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(message).encode())
        except _BROKEN:
            return False
        return True

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Returns the next message, or None if none arrives in time.

        Raises:
            EOFError, OSError: the connection is broken.
            ValueError: the server sent something that is not a message.
        """
        if not self._connection.poll(seconds):
            return None
        return parse(self._connection.recv_bytes(_MOST_BYTES))


def _open_port(to_other_hosts: bool, size: int) -> socket.socket:
    """Returns a socket that listens on a free port: of all of this host's addresses, or of the loopback interface."""
    if not to_other_hosts:
        return socket.create_server((LOOPBACK, 0), backlog=size)
    # Every rank connects by several addresses, and a connection that the queue has no room for is retried late.
    queued = 16 * size
    with suppress(OSError):  # IPv6 may be built in, but switched off
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=queued)
    return socket.create_server(("", 0), backlog=queued)


def _connect_any(addresses: Sequence[str], port: int, key: bytes, seconds: float) -> Connection:
    """Returns a connection by the first address that leads to the server. All are tried at once: some may time out.

    An address of rank 0's host may also be one of this host (docker0 is the same on all): the key identifies the
    server.
    """
    results: queue.SimpleQueue[tuple[str, Connection | str]] = queue.SimpleQueue()

    def connect(address: str) -> None:
        try:
            connection = socket.create_connection((address, port), timeout=seconds)
            results.put((address, _authenticate(connection, key, server=False)))
        except Exception as error:
            results.put((address, str(error) or type(error).__name__))

    for address in addresses:
        threading.Thread(target=connect, args=(address,), name="torchmn-connect", daemon=True).start()
    failures = dict.fromkeys(addresses, "no answer")
    deadline = monotonic() + seconds
    with suppress(queue.Empty):
        for _ in addresses:
            address, result = results.get(timeout=max(0.0, deadline - monotonic()))
            if isinstance(result, Connection):
                return result  # later ones are dropped, which closes them
            failures[address] = result
    raise ConnectionError(", ".join(f"{address}: {failure}" for address, failure in failures.items()))


def _authenticate(plain: socket.socket, key: bytes, server: bool) -> Connection:
    """Returns the connection of a socket whose other end proves in time that it has the key."""
    with plain:
        plain.settimeout(None)
        _limit_reads(plain, CONNECT_SECONDS)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # Linux has them all
                plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection = Connection(_duplicate(plain.fileno()))
        try:
            first, second = (deliver_challenge, answer_challenge) if server else (answer_challenge, deliver_challenge)
            first(connection, key)
            second(connection, key)
        except BaseException:
            connection.close()
            raise
        _limit_reads(plain, 0.0)
        return connection


def _duplicate(file: int) -> int:
    """Returns another descriptor of an open file; waits a while if this process has too many open files."""
    deadline = monotonic() + CONNECT_SECONDS
    while True:
        try:
            return os.dup(file)
        except OSError as error:
            if error.errno not in _FULL or monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def _limit_reads(plain: socket.socket, seconds: float) -> None:
    """Makes reads fail after this time; 0: never. A socket's `settimeout` does not apply to a `Connection` of it."""
    whole = int(seconds)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, int((seconds - whole) * 1e6)))
