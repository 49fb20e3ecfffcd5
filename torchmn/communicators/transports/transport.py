"""The interface of a transport, `Transport`, and of the objects that its methods return.

A transport moves memory between the ranks of a group. Its callers check arguments, copy tensors to the host, split
large buffers, and register waits with the watchdog. CONTRIBUTING.md lists the steps to add a transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from torchmn.communicators.messages.wire import Message
from torchmn.communicators.transports.group import Group

PeerBuffers = Mapping[int, Tensor]
"""Flat, contiguous tensors by peer."""


@dataclass(frozen=True)
class Traits:
    """Abilities of a transport.

    Attributes:
        name: the name for `create_communicator`.
        tag_limit: users' tags are smaller; replies have this tag.
        reads_gpu_memory: if False, GPU tensors are copied to the host first.
        shares_process: ranks are threads of one process, and share torch's random generator.
        sees_arrivals: `arrived` reports every message that has arrived; if False, it may miss some.
        checks_sizes: if a received buffer does not fit the memory for it, `wait` or `wait_received` of the exchange
            raise a RuntimeError. If False, it would crash the process or corrupt memory, and ranks compare sizes first.
    """

    name: str
    tag_limit: int = 1 << 30
    reads_gpu_memory: bool = False
    shares_process: bool = False
    sees_arrivals: bool = True
    checks_sizes: bool = True


class Pending(Protocol):
    """A message to `dest` that is not received yet. `tag` is None for a buffer of an exchange."""

    dest: int
    tag: int | None

    def wait(self) -> None:
        """Returns when the message is received, or when its memory is not needed here any more."""


class Exchange(Protocol):
    """Buffers in flight. Exchanges may be waited for in any order, each of them once, by any thread."""

    def wait(self) -> None:
        """Returns when all buffers are sent and received."""

    def wait_received(self) -> None:
        """Returns when all buffers are received. Those to send may still be read, and must never change again.

        So a rank need not wait for slower ranks to receive from it.
        """


class _Done:
    def wait(self) -> None: ...

    def wait_received(self) -> None: ...


DONE = _Done()
"""An exchange that is complete."""


class Carrier(Protocol):
    """An optional ability of a transport: small tensors piggyback on the number that ranks compare."""

    def payload(self, x: Tensor) -> Tensor | None:
        """Returns `x` in a form that can be carried; None if it cannot, on all ranks with the same shape and dtype."""
        ...

    def equal_carrying(self, number: int, payload: Tensor) -> list[Tensor] | None:
        """Returns all ranks' payloads, in rank order, if all passed the same number; else None, on all ranks.

        They are valid until the next comparison. Other ranks may call `Transport.equal` for the same comparison.
        """
        ...


class Transport(Protocol):
    """One rank's connections to the other ranks of its group.

    Three kinds of methods:

    - Point to point: `post`, `take`, `arrived`, `undelivered`. Several threads may call them at once, also while
      another thread is in a method of the other kinds.
    - `exchange`: called by one thread at a time. Exchanges are matched between pairs of ranks, and ranks may make
      different numbers of them.
    - Collective: `equal`, `bcast_`, `allgather_`, `allreduce_`, `subgroup`. One thread of every rank of the group calls
      them, in the same order. `flush` and `close` are called once, at the end, after all other methods.

    Tensors are detached, contiguous and, unless `Traits.reads_gpu_memory`, on the host. Those of collective methods are
    flat, except for `allreduce_`. A peer is never the rank itself. A wait for a rank that has ended must raise a
    `PeerError`, unless the watchdog ends the process (see `process_hooks.start_watchdog`).
    """

    group: Group
    traits: Traits
    carrier: Carrier | None

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        """Starts to send, without waiting for the receiver.

        If `message.private`, no other code will change its tensors, and they need not be copied. Otherwise they may
        change after this returns: copy them, or return a `Pending` that the caller waits for.
        """
        ...

    def take(self, source: int, tag: int) -> Message:
        """Waits for the next message from `source` with `tag`. Messages with the same tag arrive in order.

        The caller owns its tensors and may change them: keep no reference to the message. (`functions` detects when the
        last reference to a tensor is dropped.) They are inference tensors if and only if the calling thread is in
        inference mode.
        """
        ...

    def arrived(self, source: int, tag: int) -> bool:
        """Returns whether `take` would return at once. See `Traits.sees_arrivals`."""
        ...

    def exchange(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Exchange:
        """Starts to send and to receive buffers, none of which may be used until the exchange has been waited for.

        Exchanges between two ranks are matched in the order in which they are started. Number of bytes and dtype are
        the same at both ends, unless a user made a mistake: see `Traits.checks_sizes`. No buffer is empty.
        """
        ...

    def equal(self, number: int) -> bool:
        """Returns whether every rank passed the same 64-bit number, when all ranks have called it: it is a barrier."""
        ...

    def bcast_(self, flat: Tensor, root: int) -> None:
        """Overwrites `flat` with that of `root`."""

    def allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """Writes all ranks' `flat`, of `counts[rank]` elements, into `whole` in rank order."""

    def allreduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> bool:
        """Reduces contiguous `source` over ranks into contiguous `out`, which may be the same.

        The result must have the same bits on all ranks. Callers pass 16-bit floats as float32, and a mean as a sum with
        a scale.

        Args:
            op: sum, max, min or prod.
            scale: a factor for the result.

        Returns:
            False, on all ranks and without doing anything, if the transport cannot reduce this dtype: the communicator
            then gathers and reduces.
        """
        ...

    def subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> Transport | None:
        """Returns the transport of a new group of the ranks `members_of[color]`, in this order; None without a color.

        `self.group.among(members_of[color], name)` makes the group. `name` is unique in the job.
        """
        ...

    def undelivered(self) -> list[int]:
        """Returns the ranks that have not received everything posted to them. A rank that leaves announces them."""
        ...

    def flush(self) -> Iterable[Pending]:
        """Yields what was posted, or sent by an exchange after `wait_received`, and is not received yet.

        The caller waits for each before it takes the next, and posts nothing meanwhile.
        """
        ...

    def close(self) -> None:
        """Releases the connections and buffers of the transport."""
