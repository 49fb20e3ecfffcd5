"""Edges: the messages of forward for which a gradient is still to be sent or received.

A message whose sender needs a gradient is an edge: a request of torchmn/communicators/replies.py. Backward replies with
the gradients. Replies are stored here until backward needs them, so that the order in which autograd visits the edges
does not matter.

Every edge gets a reply: gradients, or an empty message, which means zeros, once its receiver's backward cannot reach it
any more. So a rank can distinguish a `send` that backward need not visit from a forgotten one: gradients come only for
the latter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import count
from threading import get_ident
from time import monotonic, sleep
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchmn._torch_compat import call_after_backward
from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages import wire
from torchmn.communicators.messages.wire import Kind, Message
from torchmn.communicators.watchdog import source_lines
from torchmn.communicators.watchdog.waits import ReportSection, Watch, sections
from torchmn.errors import DelegateError, PeerError

Key = tuple[int, int]  # (peer, number)

HIGHER_ORDER = 1 << 32
"""Added to an edge's number for the edge of its gradient, if backward is itself differentiated."""

# The number on a reply also contains the number of the line that received the value, and whether its text is included.
_NUMBER_BITS, _LINE_BITS = 40, 16
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_HAS_LINE_TEXT = 1 << (_NUMBER_BITS + _LINE_BITS)
_MAX_SHOWN_EDGES = 200
_GRACE_SECONDS = 1.0  # at the end of backward, for replies to forgotten edges that may be in transit


Place = tuple[int, CodeType, int]
"""The tag of an edge, and the instruction of the user's code that made it."""


class Edge:
    """One end of an edge, held by a node of autograd's graph.

    Attributes:
        edges: of the communicator.
        key: peer and number of the edge.
        place: where it was made.
        abandoned: gets the edge's key if the node is deleted before backward has visited it.
        visited: whether backward has visited it.
    """

    __slots__ = ("abandoned", "edges", "key", "place", "visited")

    def __init__(self, edges: Edges, key: Key, place: Place, abandoned: deque[Key]):
        self.edges = edges
        self.key = key
        self.place = place
        self.abandoned = abandoned
        self.visited = False

    def __del__(self) -> None:
        # May run at any time, also while another message is sent: so this only records the key.
        if not self.visited:
            self.abandoned.append(self.key)


class Edges:
    """The edges of one rank and one communicator."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._messages = comm.replies
        self._numbers: dict[int, count[int]] = {}  # of edges to each rank
        self.sent: dict[Key, Place] = {}  # whose reply was not used yet
        self.received: dict[Key, Place] = {}  # without a reply yet
        self.forgotten: deque[Key] = deque()  # sent edges that this rank's backward cannot reach any more
        self._declined = comm.replies.declined  # received edges of that kind
        self.unreached: dict[int, set[int]] = {}  # forgotten edges whose reply may still come: numbers by peer
        self.unreached_since_backward: list[Key] = []
        self.chain_edges: dict[int, str] = {}  # by tag: description of an edge of a MultiNodeChainList
        self._replies: dict[Key, list[Message]] = {}
        self._receivers: dict[int, int] = {}  # by peer: the thread that waits for its next reply
        self._sent_lines: dict[tuple[int, int, int], tuple[int, CodeType]] = {}  # lines whose text a peer has received
        self._peer_lines: dict[Key, str] = {}  # (peer, number of the line) -> text

    # -- forward -----------------------------------------------------------------------------------------------

    def next_number(self, dest: int) -> int:
        """Returns the number of a new edge to `dest`."""
        return next(self._numbers.setdefault(dest, count(1)))  # atomic: threads must not get the same number

    def send(self, key: Key, place: Place) -> Edge:
        """Returns the sender's end of a new edge."""
        self.sent[key] = place
        return Edge(self, key, place, self.forgotten)

    def receive(self, key: Key, place: Place) -> Edge:
        """Returns the receiver's end of a new edge."""
        self.received[key] = place
        return Edge(self, key, place, self._declined)

    def poll(self) -> None:
        """Declines edges that need no gradient; raises a DelegateError if a gradient came for a forgotten edge."""
        if self._declined:
            self._messages.send_declined()
        if self.forgotten or self.unreached:
            self._check_forgotten()

    def on_declined(self, peer: int, number: int) -> None:
        """Called when the sender of that edge was notified that there will be no gradient."""
        self.received.pop((peer, number), None)

    # -- backward ----------------------------------------------------------------------------------------------

    def reply(
        self, key: Key, gradients: tuple[Tensor, ...], place: Place, wants_gradient: tuple[bool, ...] = ()
    ) -> None:
        """Sends the gradients of a received edge, the first time with the text of the line that received it."""
        peer, number = key
        gradients = self._sendable(key, gradients)
        _, code, instruction = place
        line = self._sent_lines.get((peer, id(code), instruction))
        if line is None:
            line = self._sent_lines[peer, id(code), instruction] = (len(self._sent_lines) + 1, code)
            gradients = (*gradients, wire.from_bytes(source_lines.describe_line(code, instruction).encode()))
            number |= _HAS_LINE_TEXT
            wants_gradient = (*wants_gradient, False) if wants_gradient else ()
        number |= line[0] % (1 << _LINE_BITS) << _NUMBER_BITS
        self._messages.reply(peer, number, gradients, wants_gradient)
        self.received.pop(key, None)

    def _sendable(self, key: Key, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns `gradients` as dense tensors; if one cannot be sent, raises here and on the rank that waits."""
        if any(x.layout is not torch.strided for x in gradients):  # of an embedding with sparse=True
            gradients = tuple([x if x.layout is torch.strided else x.to_dense() for x in gradients])
        for x in gradients:
            problem = arguments.tensor_problem(x)
            if problem:
                comm = self.comm
                self.received.pop(key, None)
                text = f"rank {comm.rank} of {comm.size}: the gradient for rank {key[0]} in backward of recv: {problem}"
                self._messages.refuse_reply(*key, text)
        return gradients

    def await_reply(self, key: Key, operation: str, place: Place) -> Message:
        """Waits for the reply to an edge that was sent at `place`. Other replies of that rank are stored."""
        while key not in self._replies:
            self._receive_one(key, operation, place)
        self.sent.pop(key, None)
        reply = self._take_reply(key)
        if reply.kind == Kind.ERROR:
            reason = wire.to_bytes(reply.tensors[0]).decode()
            comm = self.comm
            raise PeerError(f"rank {comm.rank} of {comm.size}: backward of send to rank {key[0]}: {reason}")
        return reply

    def _take_reply(self, key: Key) -> Message:
        replies = self._replies[key]
        reply = replies.pop(0)
        if not replies:
            del self._replies[key]
        return reply

    def _receive_one(self, key: Key, operation: str, place: Place) -> None:
        """Waits for one more reply of that rank, unless the one to `key` is there, and stores it."""
        # On GPUs backward runs in several threads: one of them receives, the others poll what it has stored.
        peer, thread = key[0], get_ident()
        if self._receivers.setdefault(peer, thread) != thread:
            sleep(1e-4)
            return
        try:
            if key not in self._replies:
                self._store(peer, self._messages.take(peer, operation, place[0], AwaitedEdge(key, place)))
        finally:
            del self._receivers[peer]

    def _store(self, peer: int, message: Message) -> None:
        if message.request & _HAS_LINE_TEXT:
            self._peer_lines[peer, _line_number(message)] = wire.to_bytes(message.tensors[-1]).decode()
            message.tensors, message.wants_reply = message.tensors[:-1], message.wants_reply[:-1]
        self._replies.setdefault((peer, message.request & _NUMBER_MASK), []).append(message)

    def _store_arrived(self, peer: int) -> None:
        """Stores the replies of that rank that have arrived."""
        while self._messages.arrived(peer):
            self._receive_one((peer, 0), "the gradient of a send", _NO_PLACE)

    # -- edges that backward did not visit ---------------------------------------------------------------------

    def poll_after_backward(self) -> None:
        """Called during backward: as `poll`, at the end of backward, where it waits a while for late replies."""
        if self._declined:
            self._messages.send_declined()
        if self.forgotten:
            self._collect_forgotten()
        if self.unreached_since_backward and self.comm.traits.sees_arrivals:
            expected, self.unreached_since_backward = self.unreached_since_backward, []
            call_after_backward(lambda: self._check_forgotten(expected))

    def drain(self) -> None:
        """At the end: replies to all received edges, and waits for all replies; raises if one is a gradient."""
        self.decline_all()
        for key, place in list(self.sent.items()):
            reply = self.await_reply(key, "finalize (the gradient of a send)", place)
            self._check_empty(key, place, reply)
        self._check_surplus()

    def decline_all(self) -> None:
        """Declines every edge that was received and has no reply yet."""
        self._messages.send_declined()
        self._declined.extend(self.received)
        self._messages.send_declined()

    def _check_surplus(self) -> None:
        """Raises if a peer's backward sent gradients for an edge more often than this rank's backward visited it."""
        comm = self.comm
        for peer in self._numbers:
            self._store_arrived(peer)
        for (peer, number), replies in self._replies.items():
            if any(reply.tensors for reply in replies):
                line = self._peer_lines.get((peer, _line_number(replies[0])), "an unknown line")
                raise DelegateError(
                    f"rank {comm.rank} of {comm.size}: rank {peer} went through the recv at {line} in more backwards "
                    f"than this rank through its send (number {number} to that rank). The gradients of this rank lack "
                    "those of the other backwards. With retain_graph=True, both ranks must call backward equally often."
                )

    def _collect_forgotten(self) -> None:
        while self.forgotten:
            key = self.forgotten.popleft()
            if key in self.sent:
                self.unreached.setdefault(key[0], set()).add(key[1])
                self.unreached_since_backward.append(key)
        if len(self.unreached_since_backward) > 1000:  # a program without backward
            self.unreached_since_backward = [key for key in self.unreached_since_backward if self._is_unreached(key)]

    def _is_unreached(self, key: Key) -> bool:
        return key[1] in self.unreached.get(key[0], ())

    def _check_forgotten(self, expected: Collection[Key] = ()) -> None:
        """Checks the replies to forgotten edges that have arrived; waits a while for those that are `expected`."""
        self._collect_forgotten()
        deadline = monotonic() + _GRACE_SECONDS
        while True:
            for peer in list(self.unreached):
                self._store_arrived(peer)
                self._check_replies_of_unreached(peer)
            if not any(map(self._is_unreached, expected)) or monotonic() > deadline:
                return
            sleep(1e-3)

    def _check_replies_of_unreached(self, peer: int) -> None:
        for number in [number for number in self.unreached[peer] if (peer, number) in self._replies]:
            self.unreached[peer].discard(number)
            place = self.sent[peer, number]
            key = (peer, number)
            self._check_empty(key, place, self.await_reply(key, "the gradient of a send", place))
        if not self.unreached[peer]:
            del self.unreached[peer]

    def _check_empty(self, key: Key, place: Place, reply: Message) -> None:
        """Raises if the reply to an edge that backward did not visit is a gradient."""
        if not reply.tensors:
            return
        comm = self.comm
        tag = place[0]
        sent_at = source_lines.describe_line(*place[1:])
        received_at = self._peer_lines.get((key[0], _line_number(reply)), "an unknown line")
        if tag in self.chain_edges:
            edge, calls = self.chain_edges[tag], (f"of the chain at {sent_at}", f"call of the chain at {received_at}")
            advice = (
                "What the chain returned there must be part of this rank's backward: call backward on a loss made of "
                "its output, or on the delegate that a rank without output gets, as often as the other ranks do."
            )
        else:
            edge, calls = f"the send to rank {key[0]}, tag {tag},", (f"at {sent_at}", f"recv at {received_at}")
            advice = (
                "The tensor that send returned (its delegate) must be part of this rank's backward: pass it on as "
                "recv(..., delegate_variable=phi), join it by y = pseudo_connect(phi, y), or call "
                "(loss + phi).backward()."
            )
        raise DelegateError(
            f"rank {comm.rank} of {comm.size}: backward did not visit {edge} {calls[0]}, but its gradient came back "
            f"from the {calls[1]}. Gradients of this rank that depend on it are wrong. {advice}"
        )


def _line_number(reply: Message) -> int:
    """Returns the number of the line that received the value whose gradient this is."""
    return reply.request >> _NUMBER_BITS & (1 << _LINE_BITS) - 1


def edges_of(comm: Communicator) -> Edges:
    """Returns the edges of a communicator. From the first call on, the communicator is kept until it is finalized."""
    replies = comm.replies
    if replies.handler is None:
        replies.handle(Edges(comm), comm)
    return cast(Edges, replies.handler)


# -- the section of the watchdog's report about edges ----------------------------------------------------------


class AwaitedEdge(NamedTuple):
    """The edge for whose gradient a rank waits in backward of `send`."""

    key: Key
    place: Place


_NO_PLACE: Place = (0, edges_of.__code__, 0)


def _facts(watch: Watch) -> dict[str, Any]:
    """Returns the edge this rank waits for, and those it has not replied to.

    Each is a list [communicator, source, dest, number, line].
    """
    awaited: list[Any] | None = None
    owed: list[list[Any]] = []
    wait = watch.longest()
    if wait is not None and isinstance(wait.about, AwaitedEdge):
        (peer, number), (_, code, instruction) = wait.about
        line = source_lines.describe_line(code, instruction)
        awaited = [wait.group.name, watch.rank, wait.group.world_ranks[peer], number, line]
    for comm in list(watch.pinned):
        if isinstance(comm.replies.handler, Edges):
            for (source, number), (_, code, instruction) in list(comm.replies.handler.received.items()):
                line = source_lines.describe_line(code, instruction)
                owed.append([comm.name, comm.world_ranks[source], watch.rank, number, line])
    return {"awaited": awaited, "owed": owed[-_MAX_SHOWN_EDGES:]}


def _lines(facts: dict[int, dict[str, Any]]) -> list[str]:
    """Returns, for each gradient that a rank waits for, the line that sent the value and the line that received it."""
    received: dict[tuple[Any, ...], str] = {
        tuple(edge[:4]): edge[4] for of_rank in facts.values() for edge in of_rank["owed"]
    }
    lines: list[str] = []
    for of_rank in facts.values():
        if of_rank["awaited"] is None:
            continue
        *edge, sent_at = of_rank["awaited"]
        _, source, dest, _ = edge
        lines.append(f"rank {source} waits for the gradient of what it sent to rank {dest} at {sent_at};")
        if tuple(edge) in received:
            lines.append(
                f"  rank {dest} received it at {received[tuple(edge)]}, and has not run its backward: "
                "the value, or a delegate behind it, is not part of its loss (see pseudo_connect)"
            )
        else:
            lines.append(f"  rank {dest} has not received it")
    return lines


sections["gradients"] = ReportSection(_facts, _lines)
