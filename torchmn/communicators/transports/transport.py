"""The contract of a transport.

To add one, write a class with the members of `Transport` and give an instance to `Communicator`. The communicator
checks arguments, cuts buffers to size and makes the watchdog's notes; a transport only moves memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from torchmn.communicators.group import Group
from torchmn.communicators.wire import Message

Buffers = Mapping[int, Tensor]
"""Flat, contiguous tensors by peer."""


@dataclass(frozen=True)
class Traits:
    """What a transport can do.

    Attributes:
        name: as `create_communicator` takes it.
        tag_limit: users' tags are smaller; replies travel with this one.
        reads_gpu_memory: else GPU tensors are copied to the host first.
        shares_process: ranks are threads of one process, and share torch's random generator.
        sees_arrivals: `arrived` sees every message that has come; else it may return False for one that has.
        checks_sizes: a message of another size than the room made for it raises; else it ends the process.
    """

    name: str
    tag_limit: int = 1 << 30
    reads_gpu_memory: bool = False
    shares_process: bool = False
    sees_arrivals: bool = True
    checks_sizes: bool = True


class Pending(Protocol):
    """A message to `dest` that has not been received. `tag` is None for a buffer of an exchange."""

    dest: int
    tag: int | None

    def wait(self) -> None:
        """Returns when it has been received."""


class Exchange(Protocol):
    """Buffers on their way."""

    def wait(self) -> None:
        """Returns when all have been sent and filled."""

    def wait_received(self) -> None:
        """Returns when all are filled. Those that were sent may still be read, and must never change again.

        So a rank waits for what it needs, and not for slower ranks to take what they need.
        """


class _Done:
    def wait(self) -> None: ...

    def wait_received(self) -> None: ...


DONE = _Done()
"""An exchange that has ended."""


class Carrier(Protocol):
    """An optional ability of a transport: small tensors travel with the number that ranks compare."""

    def payload(self, x: Tensor) -> Tensor | None:
        """Returns `x` as it can be carried; None if it cannot. The same on all ranks for the same shape and dtype."""
        ...

    def equal_carrying(self, number: int, payload: Tensor) -> list[Tensor] | None:
        """Returns all ranks' payloads, in rank order, if all passed the same number; else None, on all ranks.

        They are valid until the next comparison. A rank may be in `Transport.equal` meanwhile.
        """
        ...


class Transport(Protocol):
    """One rank's end of the connections of a group.

    Every method but `post`, `take`, `arrived` and `undelivered` is called by all ranks of the group, in the same order.
    Those four may be called by several threads at once, also while another thread is in a collective method.
    """

    group: Group
    traits: Traits
    carrier: Carrier | None

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        """Starts to send, without waiting for the receiver.

        If `message.private` is False, its tensors may change once this has returned: copy them. Or return what is to be
        waited for before they may change.
        """
        ...

    def take(self, source: int, tag: int) -> Message:
        """Waits for the next message from `source` with `tag`. Messages with the same tag arrive in order."""
        ...

    def arrived(self, source: int, tag: int) -> bool:
        """Whether `take` would return at once. See `Traits.sees_arrivals`."""
        ...

    def exchange(self, outgoing: Buffers, incoming: Buffers) -> Exchange:
        """Starts to send and to fill buffers. None may be touched until the exchange has been waited for.

        Sizes match at both ends. Exchanges between two ranks are matched in the order in which they were started.
        """
        ...

    def equal(self, number: int) -> bool:
        """Whether every rank passed the same 64-bit number. Returns when all ranks have called it: it is a barrier."""
        ...

    def bcast_(self, flat: Tensor, root: int) -> None:
        """Fills `flat` with that of `root`."""

    def allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """Fills `whole` with all ranks' `flat`, of `counts[rank]` elements."""

    def allreduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> bool:
        """Reduces contiguous `source` over ranks into contiguous `out`, which may be the same.

        Args:
            op: sum, max, min or prod.
            scale: a factor for the result.

        Returns:
            False, on all ranks, and nothing was done, if it cannot: the communicator gathers and reduces then.
        """
        ...

    def subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> Transport | None:
        """Returns the transport of a new group called `name`, of the ranks `members_of[color]`; None without a color.

        `Group.among` makes the group.
        """
        ...

    def undelivered(self) -> list[int]:
        """Returns the ranks that have not received yet what was posted to them."""
        ...

    def flush(self) -> Iterable[Pending]:
        """Yields every message that was posted and not received. The caller waits for each before it asks for more."""
        ...

    def close(self) -> None:
        """Gives back what the transport holds."""
