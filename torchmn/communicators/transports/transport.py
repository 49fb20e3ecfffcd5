"""The contract of a transport.

A transport moves memory between the ranks of a group. Arguments are checked, tensors staged and cut to size, and the
watchdog's notes made before it is called. CONTRIBUTING.md says what else a new transport needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from torchmn.communicators.messages.wire import Message
from torchmn.communicators.transports.group import Group

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
        sees_arrivals: `arrived` sees every message that has come; else it may return False for one that has come.
        checks_sizes: a buffer of an exchange that does not fit the room made for it is a RuntimeError of its `wait` or
            `wait_received`. If False, it would crash the process or corrupt memory: then ranks compare sizes first.
    """

    name: str
    tag_limit: int = 1 << 30
    reads_gpu_memory: bool = False
    shares_process: bool = False
    sees_arrivals: bool = True
    checks_sizes: bool = True


class Pending(Protocol):
    """A message to `dest` that its receiver has not taken. `tag` is None for a buffer of an exchange."""

    dest: int
    tag: int | None

    def wait(self) -> None:
        """Returns when the receiver has it, or when its memory is not needed here any more."""


class Exchange(Protocol):
    """Buffers on their way. Exchanges may be waited for in any order, each of them once, by any thread."""

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

    Three kinds of methods:

    - `post`, `take`, `arrived`, `undelivered`: for any rank, by several threads at once, also while another thread is
      in a method of the other kinds.
    - `exchange`: by one thread at a time; ranks may call it more or less often than others. Only pairs of ranks match.
    - `equal`, `bcast_`, `allgather_`, `allreduce_`, `subgroup`: by one thread of every rank of the group, in the same
      order. `flush` and `close`: once, at the end, when no other method will be called.

    Tensors are detached, contiguous and, unless `Traits.reads_gpu_memory`, on the host. Those of collective methods are
    flat but for `allreduce_`. A peer is never the rank itself. A wait for a rank that has ended must end, too, and
    raise a `PeerError`, unless the process is ended from outside (see `job.guard`).
    """

    group: Group
    traits: Traits
    carrier: Carrier | None

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        """Starts to send, without waiting for the receiver.

        If `message.private`, no other code will change its tensors, and they may be handed over as they are. Else they
        may change once this has returned: copy them, or return what is to be waited for before they may change.
        """
        ...

    def take(self, source: int, tag: int) -> Message:
        """Waits for the next message from `source` with `tag`. Messages with the same tag arrive in order.

        Its tensors belong to the caller alone, who may change them: keep no reference to the message. (Autograd's layer
        notices when the last reference to a tensor goes.) They are inference tensors if and only if the calling thread
        is in inference mode, as tensors are that it makes itself.
        """
        ...

    def arrived(self, source: int, tag: int) -> bool:
        """Whether `take` would return at once. See `Traits.sees_arrivals`."""
        ...

    def exchange(self, outgoing: Buffers, incoming: Buffers) -> Exchange:
        """Starts to send and to fill buffers. None may be touched until the exchange has been waited for.

        Exchanges between two ranks are matched in the order in which these started them. Number of bytes and dtype are
        the same at both ends, unless a user made a mistake: see `Traits.checks_sizes`. No buffer is empty.
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

        The result must have the same bits on all ranks. 16-bit floats come as float32, a mean as a sum with a scale.

        Args:
            op: sum, max, min or prod.
            scale: a factor for the result.

        Returns:
            False, on all ranks, and nothing was done, if it cannot: the communicator gathers and reduces then.
        """
        ...

    def subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> Transport | None:
        """Returns the transport of a new group, of the ranks `members_of[color]` in this order; None without a color.

        `self.group.among(members_of[color], name)` makes the group. No other group of the job has this name.
        """
        ...

    def undelivered(self) -> list[int]:
        """Returns the ranks that have not taken yet what was posted to them. A rank that leaves announces it."""
        ...

    def flush(self) -> Iterable[Pending]:
        """Yields what was posted, or sent by an exchange after `wait_received`, and is not with its receiver yet.

        The caller waits for each before it asks for the next. Nothing more is posted meanwhile.
        """
        ...

    def close(self) -> None:
        """Gives back what the transport holds."""
