"""`Replies` sends messages between two ranks, any of which may request a reply.

A request is a message with a number that its sender chose. The reply has the same number, and a tag that no user can
choose, so that replies never match users' receives. A receiver that will not reply declines: it replies without
tensors. The layer above defines requests and replies (torchmn/functions/edges.py sends gradients).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor

from torchmn._torch_compat import ProfilerRange, is_profiling
from torchmn.communicators import arguments
from torchmn.communicators.buffers import Buffers
from torchmn.communicators.messages import wire
from torchmn.communicators.messages.wire import ArrayTensor, Kind, Message
from torchmn.communicators.watchdog.waits import Wait
from torchmn.context import here
from torchmn.errors import ArgumentError, PeerError


class Handler(Protocol):
    """Callbacks of the layer above for the requests and replies of a communicator."""

    def on_declined(self, peer: int, number: int) -> None:
        """Called when a request of `peer` was declined."""

    def decline_all(self) -> None:
        """Declines every request that was received and not replied to. Must not wait."""

    def drain(self) -> None:
        """Waits for all replies that are outstanding. Called when the communicator is finalized."""


class Replies:
    """One rank's point-to-point messages.

    Attributes:
        declined: (source, number) of requests that get no reply. Any thread may append at any time; the replies are
            sent before this rank waits the next time.
        handler: see `Handler`; None until the first request.
        taken_tags: number of tags that other layers use, from the highest downwards.
    """

    def __init__(self, buffers: Buffers):
        self._transport = transport = buffers.transport
        self._group = transport.group
        self._buffers = buffers
        self._tag_limit = transport.traits.tag_limit
        self.declined: deque[tuple[int, int]] = deque()
        self.handler: Handler | None = None
        self.taken_tags = 0

    def handle(self, handler: Handler, comm: object) -> None:
        """Sets the handler, and keeps `comm` until it is finalized: other ranks may wait for its replies."""
        self.handler = handler
        self._group.watch.pinned.add(comm)

    # -- users' messages ---------------------------------------------------------------------------------------

    def check_peer(self, operation: str, name: str, peer: object, tag: object) -> None:
        """Raises if `peer`, the argument called `name`, is not another rank, or if `tag` is not a valid tag."""
        group = self._group
        here.watch = group.watch
        if type(peer) is int and 0 <= peer < group.size and peer != group.rank and not group.closed:  # noqa: SIM102
            if type(tag) is int and 0 <= tag < self._tag_limit:
                return  # the common case; the rest builds the error message
        problem = arguments.rank_problem(peer, group.size, name)
        if problem is None and peer == group.rank:
            problem = (
                f"expected {name} to be another rank, got this rank itself ({peer}): keep the value, do not send it"
            )
        if problem is None and (isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < self._tag_limit):
            problem = f"expected tag to be an int in 0..{self._tag_limit - 1}, got {tag!r}"
        group.check_open(operation)
        if problem:
            raise ArgumentError(f"rank {group.rank} of {group.size}: {operation}: {problem}")

    def send(
        self,
        x: Tensor | Sequence[Tensor],
        dest: int,
        tag: int,
        number: int = 0,
        wants_reply: tuple[bool, ...] = (),
    ) -> None:
        """Sends a tensor, or a tuple or list of tensors, without waiting for the receiver.

        Args:
            dest, tag: checked by `check_peer`.
            number: of the request, if this message is one; 0 otherwise.
            wants_reply: for which of the tensors a request expects a reply.

        Raises:
            ArgumentError: `x` cannot be sent. The receiver raises a PeerError.
        """
        many = isinstance(x, list | tuple)
        tensors: tuple[Any, ...] = tuple(x) if many else (x,)
        for item in tensors:
            problem = arguments.tensor_problem(item)
            if problem:
                self.refuse("send", dest, tag, f"{problem} (for other objects: send_obj)")
        kind = Kind.TUPLE if many else Kind.TENSOR
        if tensors and type(tensors[0]) is ArrayTensor:
            kind = Kind.ARRAYS if many else Kind.ARRAY
        self.post(Message(kind, tensors, number, wants_reply), dest, tag)

    def receive(self, source: int, tag: int, operation: str = "recv") -> Message:
        """Returns the next message from `source` with this `tag`. If its `request` is not 0, a reply is expected."""
        if self.declined:
            self.send_declined()
        group = self._group
        with Wait(group, operation, source, tag):
            message = self._transport.take(source, tag)
        if message.kind == Kind.ERROR:
            reason = wire.to_bytes(message.tensors[0]).decode()
            raise PeerError(f"rank {group.rank} of {group.size}: {operation} from rank {source}, tag {tag}: {reason}")
        return self._buffers.move_to_gpu(message) if message.on_gpu else message

    def post(self, message: Message, dest: int, tag: int) -> None:
        """Sends a message whose tensors were checked."""
        tensors, on_gpu, private = [], [], True
        for given in message.tensors:
            x = self._buffers.staged(given)
            tensors.append(x)
            on_gpu.append(given.is_cuda)
            private &= x.data_ptr() != given.data_ptr()
        message.tensors = tuple(tensors)
        message.on_gpu = tuple(on_gpu) if True in on_gpu else ()
        message.private = private or message.kind == Kind.OBJECT
        if is_profiling():
            with ProfilerRange("torchmn::send"):
                pending = self._transport.post(message, dest, tag)
        else:
            pending = self._transport.post(message, dest, tag)
        if pending is not None:
            with Wait(self._group, "send", dest, tag):
                pending.wait()

    def refuse(self, operation: str, dest: int, tag: int, problem: str) -> NoReturn:
        """Raises an ArgumentError, and makes the receiver of this message raise a PeerError."""
        text = f"rank {self._group.rank} of {self._group.size}: {operation} to rank {dest}, tag {tag}: {problem}"
        self.post(Message(Kind.ERROR, (wire.from_bytes(text.encode()),)), dest, tag)
        raise ArgumentError(text)

    # -- replies -----------------------------------------------------------------------------------------------

    def reply(self, peer: int, number: int, tensors: tuple[Tensor, ...], wants_reply: tuple[bool, ...] = ()) -> None:
        """Replies to a request of `peer` with tensors that were checked; without tensors, declines it."""
        self.post(Message(Kind.TUPLE, tensors, number, wants_reply), peer, self._tag_limit)

    def refuse_reply(self, peer: int, number: int, text: str) -> NoReturn:
        """Raises an ArgumentError, and replies to a request of `peer` with its text, in a message of `Kind.ERROR`."""
        self.post(Message(Kind.ERROR, (wire.from_bytes(text.encode()),), number), peer, self._tag_limit)
        raise ArgumentError(text)

    def take(self, peer: int, operation: str, tag: int, about: Any = None) -> Message:
        """Returns the next reply of `peer`, to any request.

        Args:
            peer: the rank that replies.
            operation, tag: for the watchdog.
            about: more data on this wait for the watchdog's report; see `waits.sections`.
        """
        with Wait(self._group, operation, peer, tag, about):
            message = self._transport.take(peer, self._tag_limit)
        return self._buffers.move_to_gpu(message) if message.on_gpu else message

    def arrived(self, peer: int) -> bool:
        """Returns whether a reply of `peer` has arrived. The transport may miss it: see `Traits.sees_arrivals`."""
        return self._transport.arrived(peer, self._tag_limit)

    def check_open(self, operation: str) -> None:
        """Raises if the communicator is closed."""
        self._group.check_open(operation)

    def decline_all(self) -> None:
        """Declines every request that was received and not replied to, before this rank leaves."""
        self.send_declined()
        if self.handler is not None:
            self.handler.decline_all()

    def send_declined(self) -> None:
        """Sends the replies to declined requests."""
        while self.declined:
            try:
                peer, number = self.declined.popleft()
            except IndexError:  # another thread was faster
                return
            self.reply(peer, number, ())
            if self.handler is not None:
                self.handler.on_declined(peer, number)
