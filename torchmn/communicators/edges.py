"""Edges of the graph that autograd follows across ranks: which message of forward still owes or awaits a gradient.

A message whose sender wants a gradient is an edge, and carries its number. Backward answers it with a message of the
same number, on a tag that no user can choose; answers are kept here until they are asked for, so that it does not
matter in which order autograd visits the edges.

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
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchmn.communicators import checks, watchdog, wire
from torchmn.communicators.wire import Kind, Message
from torchmn.errors import ArgumentError, DelegateError, PeerError

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator

Key = tuple[int, int]  # (peer, number)

HIGHER_ORDER = 1 << 32
"""Added to an edge's number for its gradient, which is an edge of its own if backward is differentiated, too."""

# What else the number on an answer says: which line received the value, and whether the text of that line is enclosed.
_NUMBER_BITS, _LINE_BITS = 40, 16
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
_TEXT_ENCLOSED = 1 << (_NUMBER_BITS + _LINE_BITS)
_PATIENCE = 1.0  # for the answer to a forgotten edge, at the end of backward: the other rank's may be under way


Place = tuple[int, CodeType, int]
"""The tag of an edge, and the instruction of the user's code that made it.

It is made for every message: so it is a plain tuple, and which line that is, is worked out when somebody asks.
"""


_users_names: dict[str, Any] | None = None


def place_of_caller(tag: int, frame: FrameType) -> Place:
    """The place of an edge that is made by the code in `frame`, or by the user's code that called it."""
    global _users_names
    names = frame.f_globals
    if names is _users_names:  # most calls come from the same module of the user's
        return tag, frame.f_code, frame.f_lasti
    if not watchdog.is_library_module(names.get("__name__", "")):
        _users_names = names
    else:
        frame = watchdog.user_frame(frame)
    return tag, frame.f_code, frame.f_lasti


class Edge:
    """What a node of autograd's graph holds.

    Attributes:
        gone: gets the edge's key if its node is gone before backward has visited it.
        visited: whether backward has.
    """

    __slots__ = ("comm", "gone", "key", "place", "visited")

    def __init__(self, comm: Communicator, key: Key, place: Place, gone: deque[Key]):
        self.comm = comm
        self.key = key
        self.place = place
        self.gone = gone
        self.visited = False

    def __del__(self) -> None:
        # Anywhere and at any time, in the middle of another message too: so this only takes a note.
        if not self.visited:
            self.gone.append(self.key)


class EdgeBook:
    """One rank's edges of one communicator."""

    def __init__(self) -> None:
        self._made: dict[int, count[int]] = {}  # numbers of edges to each rank
        self.sent: dict[Key, Place] = {}  # whose answer was not taken yet
        self.received: dict[Key, Place] = {}  # not answered yet
        self.forgotten: deque[Key] = deque()  # sent edges that this rank's backward can not reach any more
        self.unneeded: deque[Key] = deque()  # received edges of that kind
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

    def send(self, comm: Communicator, key: Key, place: Place) -> Edge:
        """The sender's end of the edge of that key."""
        comm._watch.pinned.add(comm)
        self.sent[key] = place
        return Edge(comm, key, place, self.forgotten)

    def receive(self, comm: Communicator, key: Key, place: Place) -> Edge:
        """The receiver's end of the edge of that key."""
        comm._watch.pinned.add(comm)
        self.received[key] = place
        return Edge(comm, key, place, self.unneeded)

    def tend(self, comm: Communicator) -> None:
        """Say what is known to be unneeded, and raise if a gradient has come for a forgotten edge."""
        self.say_unneeded(comm)
        self._find_forgotten(comm)

    def say_unneeded(self, comm: Communicator) -> None:
        while self.unneeded:
            self.answer(comm, self.unneeded.popleft(), ())

    # -- backward ----------------------------------------------------------------------------------------------

    def answer(
        self,
        comm: Communicator,
        key: Key,
        gradients: tuple[Tensor, ...],
        place: Place | None = None,
        wants_gradient: tuple[bool, ...] = (),
    ) -> None:
        """Send the gradients of a received edge, and once the text of its line; () if there will be none."""
        peer, number = key
        if place is not None:
            _, code, instruction = place
            known = self._lines.get((peer, id(code), instruction))
            if known is None:
                known = self._lines[peer, id(code), instruction] = (len(self._lines) + 1, code)
                gradients = (*gradients, wire.from_bytes(watchdog.describe_line(code, instruction).encode()))
                number |= _TEXT_ENCLOSED
            number |= known[0] % (1 << _LINE_BITS) << _NUMBER_BITS
        at_once = len(gradients) == 1 and not wants_gradient
        if not (at_once and comm._send_at_once(gradients[0], peer, comm.tag_limit, number)):
            gradients = self._sendable(comm, key, gradients)
            wants_gradient += (False,) * (len(gradients) - len(wants_gradient))
            comm._send_message(Message(Kind.TUPLE, gradients, number, wants_gradient), peer, comm.tag_limit)
        self.received.pop(key, None)

    def _sendable(self, comm: Communicator, key: Key, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`gradients` as tensors that can travel; where one can not, raise here and let the rank that waits raise."""
        if any(x.layout is not torch.strided for x in gradients):  # an embedding's, with sparse=True
            gradients = tuple([x if x.layout is torch.strided else x.to_dense() for x in gradients])
        problem = next(filter(None, map(checks.tensor_problem, gradients)), None)
        if problem:
            text = f"rank {comm.rank} of {comm.size}: the gradient for rank {key[0]} in backward of recv: {problem}"
            refusal = Message(Kind.ERROR, (wire.from_bytes(text.encode()),), key[1], (False,))
            comm._send_message(refusal, key[0], comm.tag_limit)
            self.received.pop(key, None)
            raise ArgumentError(text)
        return gradients

    def await_answer(self, comm: Communicator, key: Key, operation: str, place: Place) -> Message:
        """The answer to an edge that was sent at `place`. Whatever else comes from that rank meanwhile is kept."""
        with watchdog.Wait(comm, operation, key[0], place[0], (key, place)):
            while key not in self._answers:
                self._listen(comm, key)
        self.sent.pop(key, None)
        answer = self._take_answer(key)
        if answer.kind == Kind.ERROR:
            reason = wire.to_bytes(answer.tensors[0]).decode()
            raise PeerError(f"rank {comm.rank} of {comm.size}: backward of send to rank {key[0]}: {reason}")
        return answer

    def _take_answer(self, key: Key) -> Message:
        answers = self._answers[key]
        answer = answers.pop(0)
        if not answers:
            del self._answers[key]
        return answer

    def _listen(self, comm: Communicator, key: Key) -> None:
        """Wait for one answer more from that rank, unless the one to `key` is there; keep it."""
        peer = key[0]
        # On GPUs backward runs in several threads. One listens; the others look now and then what it has heard.
        here = get_ident()
        if self._listeners.setdefault(peer, here) != here:
            sleep(1e-4)
            return
        try:
            if key not in self._answers:
                self._keep(comm, peer, comm._take(peer, comm.tag_limit))
        finally:
            del self._listeners[peer]

    def _keep(self, comm: Communicator, peer: int, message: Message) -> None:
        """Keep an answer until somebody asks for it."""
        if message.on_gpu:
            message = comm._placed(message)
        if message.edge & _TEXT_ENCLOSED:
            self._peers_lines[peer, _line(message)] = wire.to_bytes(message.tensors[-1]).decode()
            message.tensors, message.wants_gradient = message.tensors[:-1], message.wants_gradient[:-1]
        self._answers.setdefault((peer, message.edge & _NUMBER_MASK), []).append(message)

    # -- edges that backward did not visit ---------------------------------------------------------------------

    def tend_after_backward(self, comm: Communicator) -> None:
        """To be called within backward: `tend`, and at its end look for the answers to forgotten edges for a while."""
        self.say_unneeded(comm)
        self._note_forgotten()
        if self.lost_since_backward and comm.tells_arrivals:
            hoped_for, self.lost_since_backward = self.lost_since_backward, []
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(lambda: self._find_forgotten(comm, hoped_for))

    def settle(self, comm: Communicator) -> None:
        """At the end: answer what was not answered, and take all answers; raise if there is a gradient among them."""
        self.answer_all(comm)
        for key, place in list(self.sent.items()):
            answer = self.await_answer(comm, key, "finalize (the gradient of a send)", place)
            self._forget(comm, key, place, answer)
        self._refuse_surplus(comm)
        comm._watch.pinned.discard(comm)

    def answer_all(self, comm: Communicator) -> None:
        """Say of every edge that was received and not answered that there will be no gradient."""
        self.say_unneeded(comm)
        for key in list(self.received):
            self.answer(comm, key, ())

    def _refuse_surplus(self, comm: Communicator) -> None:
        """Raise if gradients are left that backward here did not come for, as it did for the first ones."""
        for peer in self._made:
            while comm._has_arrived(peer, comm.tag_limit):
                self._listen(comm, (peer, 0))
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

    def _find_forgotten(self, comm: Communicator, hoped_for: Collection[Key] = ()) -> None:
        """Look at what has arrived from the receivers of forgotten edges; wait a while for some of them."""
        self._note_forgotten()
        deadline = monotonic() + _PATIENCE
        while True:
            for peer in list(self.lost):
                while comm._has_arrived(peer, comm.tag_limit):
                    self._listen(comm, (peer, 0))
                self._take_answers_of_lost(comm, peer)
            if not any(map(self._is_lost, hoped_for)) or monotonic() > deadline:
                return
            sleep(1e-3)

    def _take_answers_of_lost(self, comm: Communicator, peer: int) -> None:
        for number in [number for number in self.lost[peer] if (peer, number) in self._answers]:
            self.lost[peer].discard(number)
            place = self.sent[peer, number]
            key = (peer, number)
            self._forget(comm, key, place, self.await_answer(comm, key, "the gradient of a send", place))
        if not self.lost[peer]:
            del self.lost[peer]

    def _forget(self, comm: Communicator, key: Key, place: Place, answer: Message) -> None:
        """Drop the empty answer to an edge that backward did not visit; a gradient means that it should have."""
        if not answer.tensors:
            return
        tag = place[0]
        sent_at = watchdog.describe_line(*place[1:])
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
    return answer.edge >> _NUMBER_BITS & (1 << _LINE_BITS) - 1
