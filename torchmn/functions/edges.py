"""Edges of the graph that autograd follows across ranks: which message of forward still owes or awaits a gradient.

A message whose sender wants a gradient is an edge: a request of torchmn/communicators/replies.py. Backward replies to
it with the gradients; replies are kept here until they are asked for, so that it does not matter in which order
autograd visits the edges.

Every edge is answered: with gradients, or with an empty message once its receiver can not reach it any more, which
means zeros. So a rank can tell a `send` that backward need not visit from one that was forgotten: only for the latter
gradients come.
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
from torchmn.communicators.watchdog import waits
from torchmn.communicators.watchdog.waits import Report, Watch
from torchmn.errors import DelegateError, PeerError

Key = tuple[int, int]  # (peer, number)

HIGHER_ORDER = 1 << 32
"""Added to an edge's number for its gradient, which is an edge of its own if backward is differentiated, too."""

# What else the number on an answer says: which line received the value, and whether the text of that line is enclosed.
_NUMBER_BITS, _LINE_BITS = 40, 16
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_TEXT_ENCLOSED = 1 << (_NUMBER_BITS + _LINE_BITS)
_SHOWN_EDGES = 200
_PATIENCE = 1.0  # for the answer to a forgotten edge, at the end of backward: the other rank's may be under way


Place = tuple[int, CodeType, int]
"""The tag of an edge, and the instruction of the user's code that made it."""


class Edge:
    """What a node of autograd's graph holds.

    Attributes:
        gone: gets the edge's key if its node is gone before backward has visited it.
        visited: whether backward has.
    """

    __slots__ = ("edges", "gone", "key", "place", "visited")

    def __init__(self, edges: Edges, key: Key, place: Place, gone: deque[Key]):
        self.edges = edges
        self.key = key
        self.place = place
        self.gone = gone
        self.visited = False

    def __del__(self) -> None:
        # Anywhere and at any time, in the middle of another message too: so this only takes a note.
        if not self.visited:
            self.gone.append(self.key)


class Edges:
    """One rank's edges of one communicator."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._replies = comm.replies
        self._made: dict[int, count[int]] = {}  # numbers of edges to each rank
        self.sent: dict[Key, Place] = {}  # whose answer was not taken yet
        self.received: dict[Key, Place] = {}  # not answered yet
        self.forgotten: deque[Key] = deque()  # sent edges that this rank's backward can not reach any more
        self._unneeded = comm.replies.declined  # received edges of that kind
        self.lost: dict[int, set[int]] = {}  # forgotten edges whose answer may still come: numbers by peer
        self.lost_since_backward: list[Key] = []
        self.chains: dict[int, str] = {}  # tag -> the edge of a MultiNodeChainList on it, in the words of its user
        self._answers: dict[Key, list[Message]] = {}
        self._listeners: dict[int, int] = {}  # peer -> the thread that waits for what it says next
        self._lines: dict[tuple[int, int, int], tuple[int, CodeType]] = {}  # lines here that the peer was told of
        self._peers_lines: dict[Key, str] = {}  # (peer, number of the line) -> text

    # -- forward -----------------------------------------------------------------------------------------------

    def next_number(self, dest: int) -> int:
        """The number of a new edge to `dest`."""
        return next(self._made.setdefault(dest, count(1)))  # in one step: threads must not get the same one

    def send(self, key: Key, place: Place) -> Edge:
        """The sender's end of the edge of that key."""
        self.sent[key] = place
        return Edge(self, key, place, self.forgotten)

    def receive(self, key: Key, place: Place) -> Edge:
        """The receiver's end of the edge of that key."""
        self.received[key] = place
        return Edge(self, key, place, self._unneeded)

    def tend(self) -> None:
        """Say what is known to be unneeded, and raise if a gradient has come for a forgotten edge."""
        if self._unneeded:
            self._replies.send_declined()
        if self.forgotten or self.lost:
            self._find_forgotten()

    def on_declined(self, peer: int, number: int) -> None:
        """The sender of that edge knows that there will be no gradient."""
        self.received.pop((peer, number), None)

    # -- backward ----------------------------------------------------------------------------------------------

    def answer(
        self, key: Key, gradients: tuple[Tensor, ...], place: Place, wants_gradient: tuple[bool, ...] = ()
    ) -> None:
        """Send the gradients of a received edge, and once the text of the line that received it."""
        peer, number = key
        gradients = self._sendable(key, gradients)
        _, code, instruction = place
        known = self._lines.get((peer, id(code), instruction))
        if known is None:
            known = self._lines[peer, id(code), instruction] = (len(self._lines) + 1, code)
            gradients = (*gradients, wire.from_bytes(waits.describe_line(code, instruction).encode()))
            number |= _TEXT_ENCLOSED
            wants_gradient = (*wants_gradient, False) if wants_gradient else ()
        number |= known[0] % (1 << _LINE_BITS) << _NUMBER_BITS
        self._replies.reply(peer, number, gradients, wants_gradient)
        self.received.pop(key, None)

    def _sendable(self, key: Key, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`gradients` as tensors that can travel; where one can not, raise here and let the rank that waits raise."""
        if any(x.layout is not torch.strided for x in gradients):  # an embedding's, with sparse=True
            gradients = tuple([x if x.layout is torch.strided else x.to_dense() for x in gradients])
        for x in gradients:
            problem = arguments.tensor_problem(x)
            if problem:
                comm = self.comm
                self.received.pop(key, None)
                text = f"rank {comm.rank} of {comm.size}: the gradient for rank {key[0]} in backward of recv: {problem}"
                self._replies.refuse_reply(*key, text)
        return gradients

    def await_answer(self, key: Key, operation: str, place: Place) -> Message:
        """The answer to an edge that was sent at `place`. Whatever else comes from that rank meanwhile is kept."""
        while key not in self._answers:
            self._listen(key, operation, place)
        self.sent.pop(key, None)
        answer = self._take_answer(key)
        if answer.kind == Kind.ERROR:
            reason = wire.to_bytes(answer.tensors[0]).decode()
            comm = self.comm
            raise PeerError(f"rank {comm.rank} of {comm.size}: backward of send to rank {key[0]}: {reason}")
        return answer

    def _take_answer(self, key: Key) -> Message:
        answers = self._answers[key]
        answer = answers.pop(0)
        if not answers:
            del self._answers[key]
        return answer

    def _listen(self, key: Key, operation: str, place: Place) -> None:
        """Wait for one answer more from that rank, unless the one to `key` is there; keep it."""
        # On GPUs backward runs in several threads. One listens; the others look now and then what it has heard.
        peer, here = key[0], get_ident()
        if self._listeners.setdefault(peer, here) != here:
            sleep(1e-4)
            return
        try:
            if key not in self._answers:
                self._keep(peer, self._replies.take(peer, operation, place[0], AwaitedEdge(key, place)))
        finally:
            del self._listeners[peer]

    def _keep(self, peer: int, message: Message) -> None:
        """Keep an answer until somebody asks for it."""
        if message.request & _TEXT_ENCLOSED:
            self._peers_lines[peer, _line(message)] = wire.to_bytes(message.tensors[-1]).decode()
            message.tensors, message.wants_reply = message.tensors[:-1], message.wants_reply[:-1]
        self._answers.setdefault((peer, message.request & _NUMBER_MASK), []).append(message)

    def _keep_arrived(self, peer: int) -> None:
        """Keep what has come from that rank."""
        while self._replies.arrived(peer):
            self._listen((peer, 0), "the gradient of a send", _NOWHERE)

    # -- edges that backward did not visit ---------------------------------------------------------------------

    def tend_after_backward(self) -> None:
        """To be called within backward: `tend`, and at its end look for the answers to forgotten edges for a while."""
        if self._unneeded:
            self._replies.send_declined()
        if self.forgotten:
            self._note_forgotten()
        if self.lost_since_backward and self.comm.traits.sees_arrivals:
            hoped_for, self.lost_since_backward = self.lost_since_backward, []
            call_after_backward(lambda: self._find_forgotten(hoped_for))

    def settle(self) -> None:
        """At the end: answer what was not answered, and take all answers; raise if there is a gradient among them."""
        self.decline_all()
        for key, place in list(self.sent.items()):
            answer = self.await_answer(key, "finalize (the gradient of a send)", place)
            self._forget(key, place, answer)
        self._refuse_surplus()

    def decline_all(self) -> None:
        """Say of every edge that was received and not answered that there will be no gradient."""
        self._replies.send_declined()
        self._unneeded.extend(self.received)
        self._replies.send_declined()

    def _refuse_surplus(self) -> None:
        """Raise if gradients are left that backward here did not come for, as it did for the first ones."""
        comm = self.comm
        for peer in self._made:
            self._keep_arrived(peer)
        for (peer, number), answers in self._answers.items():
            if any(answer.tensors for answer in answers):
                line = self._peers_lines.get((peer, _line(answers[0])), "an unknown line")
                raise DelegateError(
                    f"rank {comm.rank} of {comm.size}: rank {peer} went through the recv at {line} in more backwards "
                    f"than this rank through its send (the {number}. to that rank). Gradients of this rank lack what "
                    "the others brought. With retain_graph=True, both ranks must call backward equally often."
                )

    def _note_forgotten(self) -> None:
        while self.forgotten:
            key = self.forgotten.popleft()
            if key in self.sent:
                self.lost.setdefault(key[0], set()).add(key[1])
                self.lost_since_backward.append(key)
        if len(self.lost_since_backward) > 1000:  # a program that only evaluates
            self.lost_since_backward = [key for key in self.lost_since_backward if self._is_lost(key)]

    def _is_lost(self, key: Key) -> bool:
        return key[1] in self.lost.get(key[0], ())

    def _find_forgotten(self, hoped_for: Collection[Key] = ()) -> None:
        """Look at what has arrived from the receivers of forgotten edges; wait a while for some of them."""
        self._note_forgotten()
        deadline = monotonic() + _PATIENCE
        while True:
            for peer in list(self.lost):
                self._keep_arrived(peer)
                self._take_answers_of_lost(peer)
            if not any(map(self._is_lost, hoped_for)) or monotonic() > deadline:
                return
            sleep(1e-3)

    def _take_answers_of_lost(self, peer: int) -> None:
        for number in [number for number in self.lost[peer] if (peer, number) in self._answers]:
            self.lost[peer].discard(number)
            place = self.sent[peer, number]
            key = (peer, number)
            self._forget(key, place, self.await_answer(key, "the gradient of a send", place))
        if not self.lost[peer]:
            del self.lost[peer]

    def _forget(self, key: Key, place: Place, answer: Message) -> None:
        """Drop the empty answer to an edge that backward did not visit; a gradient means that it should have."""
        if not answer.tensors:
            return
        comm = self.comm
        tag = place[0]
        sent_at = waits.describe_line(*place[1:])
        received_at = self._peers_lines.get((key[0], _line(answer)), "an unknown line")
        if tag in self.chains:
            edge, calls = self.chains[tag], (f"of the chain at {sent_at}", f"call of the chain at {received_at}")
            way_out = (
                "What the chain returned there must be part of this rank's backward: call backward on a loss made of "
                "its output, or on the delegate that a rank without output gets, as often as the other ranks do."
            )
        else:
            edge, calls = f"the send to rank {key[0]}, tag {tag},", (f"at {sent_at}", f"recv at {received_at}")
            way_out = (
                "The tensor that send returned (its delegate) must be part of this rank's backward: pass it on as "
                "recv(..., delegate_variable=phi), join it by y = pseudo_connect(phi, y), or call "
                "(loss + phi).backward()."
            )
        raise DelegateError(
            f"rank {comm.rank} of {comm.size}: backward did not visit {edge} {calls[0]}, but its gradient came back "
            f"from the {calls[1]}. Gradients of this rank that depend on it are wrong. {way_out}"
        )


def _line(answer: Message) -> int:
    """The number of the line that received the value whose gradient this is."""
    return answer.request >> _NUMBER_BITS & (1 << _LINE_BITS) - 1


def edges_of(comm: Communicator) -> Edges:
    """Returns the edges of a communicator, which is kept until it is finalized if it has any."""
    replies = comm.replies
    if replies.handler is None:
        replies.handle(Edges(comm), comm)
    return cast(Edges, replies.handler)


# -- what the watchdog's table says of edges -------------------------------------------------------------------


class AwaitedEdge(NamedTuple):
    """What a rank waits for in backward of `send`."""

    key: Key
    place: Place


_NOWHERE: Place = (0, edges_of.__code__, 0)


def _facts(watch: Watch) -> dict[str, Any]:
    """The edge that this rank waits for, and those that it owes: [communicator, source, dest, number, line] of each."""
    awaited, owed = None, []
    wait = watch.longest()
    if wait is not None and isinstance(wait.about, AwaitedEdge):
        (peer, number), (_, code, instruction) = wait.about
        line = waits.describe_line(code, instruction)
        awaited = [wait.group.name, watch.rank, wait.group.world_ranks[peer], number, line]
    for comm in list(watch.pinned):
        if isinstance(comm.replies.handler, Edges):
            for (source, number), (_, code, instruction) in list(comm.replies.handler.received.items()):
                line = waits.describe_line(code, instruction)
                owed.append([comm.name, comm.world_ranks[source], watch.rank, number, line])
    return {"awaited": awaited, "owed": owed[-_SHOWN_EDGES:]}


def _lines(facts: dict[int, dict[str, Any]]) -> list[str]:
    """For each gradient that a rank waits for: the line that sent the value, and the line that received it."""
    received = {tuple(edge[:4]): edge[4] for each in facts.values() for edge in each["owed"]}
    lines = []
    for each in facts.values():
        if each["awaited"] is None:
            continue
        *edge, sent_at = each["awaited"]
        _, source, dest, _ = edge
        lines.append(f"rank {source} waits for the gradient of what it sent to rank {dest} at {sent_at};")
        if tuple(edge) in received:
            lines.append(
                f"  rank {dest} received it at {received[tuple(edge)]}, where its backward has not come by: "
                "the value, or a delegate behind it, is not part of its loss (see pseudo_connect)"
            )
        else:
            lines.append(f"  rank {dest} has not received it")
    return lines


waits.reports["gradients"] = Report(_facts, _lines)
