"""The transport of ranks that are threads of one process, for tests, notebooks and debuggers: `ThreadTransport`.

Tensors are copied when they are sent, so that ranks do not share memory.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.messages import reductions
from torchmn.communicators.messages.wire import Message
from torchmn.communicators.transports.group import Group
from torchmn.communicators.transports.transport import Carrier, Exchange, PeerBuffers, Pending, Traits
from torchmn.communicators.watchdog import report
from torchmn.communicators.watchdog.waits import RankState, Watch
from torchmn.errors import PeerError, ThreadError, WaitTimeout


class ThreadWorld:
    """State that all ranks of one `run_threads` share.

    Attributes:
        changed: lock and condition for all state of the world; notified when any of it changes.
        watches: of all ranks.
        left: ranks whose function has returned.
        failure: why all ranks must stop, or None.
        timed_out: whether the failure is a timeout.
    """

    def __init__(self, hosts: Sequence[str]):
        self.changed = threading.Condition()
        self.watches = [Watch(rank, host) for rank, host in enumerate(hosts)]
        for watch in self.watches:
            watch.announce = partial(self.announce_broken, watch.rank)
        self.left: set[int] = set()
        self.failure: str | None = None
        self.timed_out = False

    def fail(self, reason: str, timed_out: bool = False) -> None:
        """Makes every waiting rank raise."""
        with self.changed:
            if self.failure is None:
                self.failure, self.timed_out = reason, timed_out
            self.changed.notify_all()

    def announce_broken(self, rank: int, communicator: str, reason: str) -> None:
        """Makes every rank raise that waits in a collective operation of that communicator, which `rank` has broken."""
        for watch in self.watches:
            watch.mark_broken(communicator, rank, reason)
        with self.changed:
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def wait_until(self, ready: Callable[[], bool], needed: Callable[[], Sequence[int]], rank: int) -> None:
        """Waits, with the lock held, until `ready()`; raises if the world failed or a rank of `needed()` has left."""
        while not ready():
            # All operations wait here in some test: this finds those that the watchdog would not see.
            wait = self.watches[rank].waits.get(threading.get_ident())
            assert wait is not None, "an operation waits outside of a `Wait`"
            broken = self.watches[rank].broken_in(wait)
            if broken is not None:
                raise (ThreadError if broken.rank == rank else PeerError)(broken.reason)
            if self.failure is not None:
                raise (WaitTimeout if self.timed_out else PeerError)(self.failure)
            gone = self.left.intersection(needed())
            if gone:
                reason = f"rank {report.ranks_text(sorted(gone))} ended while rank {rank} waits for it"
                raise PeerError(report.table(self.states(), reason))
            self.changed.wait()

    def states(self) -> list[RankState]:
        """Returns what every rank is doing."""
        states = [watch.state() for watch in self.watches]
        return [RankState(s.rank, s.host, "", left=True) if s.rank in self.left else s for s in states]

    def watch(self, done: threading.Event) -> None:
        """Checks the ranks' waits until `done`; makes all ranks raise when a wait exceeds its timeout."""
        while not done.wait(0.1):
            for watch in self.watches:
                wait = watch.longest()
                if wait is None:
                    continue
                limit = wait.group.settings.timeout
                if monotonic() - wait.since > limit:
                    reason = report.timeout_reason(watch.rank, limit, wait.operation)
                    before = self.states()
                    done.wait(0.1)
                    states = self.states()
                    self.fail(report.table(states, reason, report.lasting_cycle(before, states)), timed_out=True)
                    return


class ThreadGroup:
    """State that the ranks of one communicator share: an all-gather of values, and mailboxes.

    Attributes:
        mailboxes: messages in order, by (destination, source, tag).
    """

    def __init__(self, world: ThreadWorld, world_ranks: Sequence[int]):
        self.world = world
        self.world_ranks = world_ranks
        self.mailboxes: defaultdict[tuple[int, int, int], deque] = defaultdict(deque)
        self._values: dict[int, Any] = {}
        self._result: list[Any] = []
        self._round = 0

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        """Returns every rank's value in rank order."""
        with self.world.changed:
            this_round = self._round
            self._values[rank] = value
            if len(self._values) == len(self.world_ranks):
                # All ranks have read the last round's result: each returned from that round before it entered this one.
                self._result = [self._values[member] for member in range(len(self.world_ranks))]
                self._values, self._round = {}, this_round + 1
                self.world.changed.notify_all()
            self.world.wait_until(lambda: self._round > this_round, self._missing, self.world_ranks[rank])
            return self._result

    def _missing(self) -> list[int]:
        return [world_rank for member, world_rank in enumerate(self.world_ranks) if member not in self._values]


class ThreadTransport:
    """One rank's connections to the other ranks of its group, which are threads."""

    traits = Traits("threads", shares_process=True)
    carrier: Carrier | None = None

    def __init__(self, group: Group, shared: ThreadGroup):
        self.group = group
        self._rank = group.rank
        self._shared = shared
        self._exchanges: defaultdict[tuple[int, int], int] = defaultdict(int)  # started, by (source, dest)

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        message.tensors = tuple(x.clone() for x in message.tensors)
        self._put(dest, tag, message)

    def take(self, source: int, tag: int) -> Message:
        message, mode = self.get(source, tag), torch.is_inference_mode_enabled()
        # A copy that the sender made in inference mode cannot be part of a graph on this rank.
        message.tensors = tuple(x if x.is_inference() == mode else x.clone() for x in message.tensors)
        return message

    def arrived(self, source: int, tag: int) -> bool:
        with self._shared.world.changed:
            return bool(self._shared.mailboxes.get((self._rank, source, tag)))

    def _put(self, dest: int, tag: int, item: Any) -> None:
        with self._shared.world.changed:
            self._shared.mailboxes[dest, self._rank, tag].append(item)
            self._shared.world.changed.notify_all()

    def get(self, source: int, tag: int) -> Any:
        """Waits for the next item from `source` with this tag."""
        world, group = self._shared.world, self.group
        with world.changed:
            boxes, key = self._shared.mailboxes, (self._rank, source, tag)
            world.wait_until(lambda: bool(boxes.get(key)), lambda: [group.world_ranks[source]], group.watch.rank)
            item = boxes[key].popleft()
            if not boxes[key]:
                del boxes[key]  # tags that never repeat must not fill the memory
            return item

    def exchange(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Exchange:
        for peer, x in outgoing.items():
            self._put(peer, self._exchange_tag(self._rank, peer), x.clone())
        return _Receives(self, {(peer, self._exchange_tag(peer, self._rank)): x for peer, x in incoming.items()})

    def _exchange_tag(self, source: int, dest: int) -> int:
        """Returns a tag that no user can choose. Both ends count their exchanges in the same order."""
        self._exchanges[source, dest] += 1
        return -self._exchanges[source, dest]

    def equal(self, number: int) -> bool:
        return len(set(self._shared.all_gather(self._rank, number))) == 1

    def bcast_(self, flat: Tensor, root: int) -> None:
        values = self._shared.all_gather(self._rank, flat.clone() if self._rank == root else None)
        if self._rank != root:
            flat.copy_(values[root])

    def allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        parts = self._shared.all_gather(self._rank, flat.clone())
        for target, part in zip(whole.split(list(counts)), parts, strict=True):
            target.copy_(part)

    def allreduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> bool:
        out.copy_(reductions.reduce_in_order(self._shared.all_gather(self._rank, source.clone()), op))
        reductions.scale_(out, scale)
        return True

    def subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> ThreadTransport | None:
        world_ranks, proposals = self.group.world_ranks, None
        if self._rank == 0:
            proposals = {
                c: ThreadGroup(self._shared.world, [world_ranks[member] for member in members])
                for c, members in members_of.items()
            }
        shared = self._shared.all_gather(self._rank, proposals)[0]
        return None if color is None else ThreadTransport(self.group.among(members_of[color], name), shared[color])

    def undelivered(self) -> list[int]:
        return []

    def flush(self) -> Iterable[Pending]:
        return ()  # `post` has put every message into its mailbox

    def close(self) -> None: ...


class _Receives:
    """An exchange in flight: the buffers that this rank has still to fill, by peer and tag."""

    def __init__(self, transport: ThreadTransport, incoming: Mapping[tuple[int, int], Tensor]):
        self._transport = transport
        self._incoming = incoming

    def wait(self) -> None:
        for (peer, tag), x in self._incoming.items():
            x.copy_(self._transport.get(peer, tag))

    def wait_received(self) -> None:
        self.wait()
