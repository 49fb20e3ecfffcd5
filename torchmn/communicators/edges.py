"""Edges of the graph that autograd follows across ranks: which message of forward still owes or awaits a gradient.

A message whose sender wants a gradient is an edge, and carries its number. Backward answers it with a message of the
same number, on a tag that no user can choose; answers are kept here until they are asked for, so that it does not
matter in which order autograd visits the edges. Every edge is answered: with gradients, or with an empty message when
its receiver can not reach it any more, which means zeros.
"""

from __future__ import annotations

import threading
from collections import deque
from types import CodeType, FrameType
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from torchmn.communicators import watchdog
from torchmn.communicators.wire import Kind, Message

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator

Key = tuple[int, int]  # (peer, number)


class Place(NamedTuple):
    """The line of the user's code that made an edge, and its tag."""

    tag: int
    code: CodeType
    line: int

    @staticmethod
    def of_caller(tag: int, frame: FrameType) -> Place:
        frame = watchdog.user_frame(frame)
        return Place(tag, frame.f_code, frame.f_lineno)

    def __str__(self) -> str:
        return watchdog.describe_line(self.code, self.line)


class Edge:
    """What a node of autograd's graph holds: when the node is gone before its backward ran, the edge says so."""

    __slots__ = ("_gone", "key", "place")

    def __init__(self, key: Key, place: Place, gone: deque[Key]):
        self.key = key
        self.place = place
        self._gone: deque[Key] | None = gone

    def visited(self) -> None:
        """Backward has come by."""
        self._gone = None

    def __del__(self) -> None:
        # Anywhere and at any time, in the middle of another message too: so this only takes a note.
        if self._gone is not None:
            self._gone.append(self.key)


class EdgeBook:
    """One rank's edges of one communicator."""

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self.sent: dict[Key, Place] = {}  # not answered yet, or the answer not taken
        self.received: dict[Key, Place] = {}  # not answered yet
        self.forgotten: deque[Key] = deque()  # sent edges that this rank's backward can not reach any more
        self.unneeded: deque[Key] = deque()  # received edges of that kind
        self._answers: dict[Key, deque[Message]] = {}
        self._listening: set[int] = set()
        self._changed = threading.Condition()

    # -- forward -----------------------------------------------------------------------------------------------

    def send(self, dest: int, place: Place) -> Edge:
        """A new edge to `dest`."""
        number = self._made[dest] = self._made.get(dest, 0) + 1
        key = (dest, number)
        self.sent[key] = place
        return Edge(key, place, self.forgotten)

    def receive(self, source: int, number: int, place: Place) -> Edge:
        """The receiver's end of the edge that `source` has numbered."""
        key = (source, number)
        self.received[key] = place
        return Edge(key, place, self.unneeded)

    # -- backward ----------------------------------------------------------------------------------------------

    def answer(self, comm: Communicator, key: Key, gradients: tuple[Tensor, ...]) -> None:
        """Send the gradients of a received edge; () says that there will be none."""
        self.received.pop(key, None)
        peer, number = key
        tag = comm.tag_limit
        if len(gradients) == 1 and comm._send_at_once(gradients[0], peer, tag, number):
            return
        comm._send_message(Message(Kind.TUPLE, gradients, number), peer, tag)

    def await_answer(self, comm: Communicator, key: Key) -> Message:
        """The answer to a sent edge. Whatever else comes from that rank meanwhile is kept."""
        with self._changed:
            while key not in self._answers:
                self._listen(comm, key[0])
            answers = self._answers[key]
            message = answers.popleft()
            if not answers:
                del self._answers[key]
        self.sent.pop(key, None)
        return message

    def _listen(self, comm: Communicator, peer: int) -> None:
        """Wait, with the lock held, for one answer more. One thread listens; on GPUs backward runs in several."""
        if peer in self._listening:
            self._changed.wait()
            return
        self._listening.add(peer)
        self._changed.release()
        try:
            message = comm._placed(comm._take(peer, comm.tag_limit))
        finally:
            self._changed.acquire()
            self._listening.discard(peer)
            self._changed.notify_all()
        self._answers.setdefault((peer, message.edge), deque()).append(message)
