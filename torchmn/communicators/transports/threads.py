"""Ranks as threads of one process: for tests, notebooks and debuggers.

Tensors are copied on their way, so a rank never sees another rank's memory.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.messages import reductions
from torchmn.communicators.messages.wire import Message
from torchmn.communicators.transports.group import Group
from torchmn.communicators.transports.transport import Buffers, Carrier, Exchange, Pending, Traits
from torchmn.communicators.watchdog import waits
from torchmn.communicators.watchdog.waits import RankState, Watch
from torchmn.errors import PeerError, ThreadError, WaitTimeout


class ThreadWorld:
    """What all ranks of one `run_threads` share: a lock, who has left, and why everybody must stop."""

    def __init__(self, hosts: Sequence[str]):
        self.changed = threading.Condition()
        self.watches = [Watch(rank, host) for rank, host in enumerate(hosts)]
        for watch in self.watches:
            watch.announce = partial(self.announce_broken, watch.rank)
        self.left: set[int] = set()
        self.failure: str | None = None
        self.timed_out = False

    def fail(self, reason: str, timed_out: bool = False) -> None:
        """Free every waiting rank with an error."""
        with self.changed:
            if self.failure is None:
                self.failure, self.timed_out = reason, timed_out
            self.changed.notify_all()

    def announce_broken(self, rank: int, communicator: str, reason: str) -> None:
        """Free every rank that waits in a collective operation of that communicator, which `rank` has broken."""
        for watch in self.watches:
            watch.mark_broken(communicator, rank, reason)
        with self.changed:
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def wait_until(self, ready: Callable[[], bool], needed: Callable[[], Sequence[int]], rank: int) -> None:
        """Wait, with the lock held, until `ready`; raise if the world failed or a needed rank has left."""
        while not ready():
            # Every operation comes by here in some test: none of them may wait where the watchdog cannot see it.
            wait = self.watches[rank].waits.get(threading.get_ident())
            assert wait is not None, "a wait without a note for the watchdog"
            broken = self.watches[rank].broken_in(wait)
            if broken is not None:
                raise (ThreadError if broken.rank == rank else PeerError)(broken.reason)
            if self.failure is not None:
                raise (WaitTimeout if self.timed_out else PeerError)(self.failure)
            gone = self.left.intersection(needed())
            if gone:
                reason = f"rank {waits.ranks_text(sorted(gone))} ended while rank {rank} waits for it"
                raise PeerError(waits.table(self.states(), reason))
            self.changed.wait()

    def states(self) -> list[RankState]:
        here = [watch.state() for watch in self.watches]
        return [RankState(s.rank, s.host, "", left=True) if s.rank in self.left else s for s in here]

    def watch(self, done: threading.Event) -> None:
        """Look at the ranks' waits until `done`; end the world when one lasts longer than its timeout."""
        while not done.wait(0.1):
            for watch in self.watches:
                wait = watch.longest()
                if wait is None:
                    continue
                limit = wait.group.settings.timeout
                if waits.monotonic() - wait.since > limit:
                    reason = f"rank {watch.rank} has waited for {limit:g} s in {wait.operation}; the job is ended"
                    self.fail(waits.table(self.states(), reason), timed_out=True)
                    return


class Meeting:
    """Where the ranks of one communicator leave a value each and take all of them."""

    def __init__(self, world: ThreadWorld, world_ranks: Sequence[int]):
        self.world = world
        self.world_ranks = world_ranks
        self.values: dict[int, Any] = {}
        self.result: list[Any] = []
        self.round = 0
        # (destination, source, tag) -> messages in order
        self.mail: defaultdict[tuple[int, int, int], deque] = defaultdict(deque)

    def all_values(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value in rank order, once all have come."""
        with self.world.changed:
            this_round = self.round
            self.values[rank] = value
            if len(self.values) == len(self.world_ranks):
                # The last round's result is read by all before anyone can complete this one.
                self.result = [self.values[member] for member in range(len(self.world_ranks))]
                self.values, self.round = {}, this_round + 1
                self.world.changed.notify_all()
            self.world.wait_until(lambda: self.round > this_round, self._absent, self.world_ranks[rank])
            return self.result

    def _absent(self) -> list[int]:
        return [world_rank for member, world_rank in enumerate(self.world_ranks) if member not in self.values]


class ThreadTransport:
    """One rank's end in a world of threads."""

    traits = Traits("threads", shares_process=True)
    carrier: Carrier | None = None

    def __init__(self, group: Group, meeting: Meeting):
        self.group = group
        self._rank = group.rank
        self._meeting = meeting
        self._exchanges: defaultdict[tuple[int, int], int] = defaultdict(int)  # started, by (source, dest)

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        message.tensors = tuple(x.clone() for x in message.tensors)
        self._put(dest, tag, message)

    def take(self, source: int, tag: int) -> Message:
        message, mode = self.get(source, tag), torch.is_inference_mode_enabled()
        # The sender may have been in inference mode, where its copies do not fit into a graph of this rank.
        message.tensors = tuple(x if x.is_inference() == mode else x.clone() for x in message.tensors)
        return message

    def arrived(self, source: int, tag: int) -> bool:
        with self._meeting.world.changed:
            return bool(self._meeting.mail.get((self._rank, source, tag)))

    def _put(self, dest: int, tag: int, item: Any) -> None:
        with self._meeting.world.changed:
            self._meeting.mail[dest, self._rank, tag].append(item)
            self._meeting.world.changed.notify_all()

    def get(self, source: int, tag: int) -> Any:
        """Waits for what `source` has put there for this rank."""
        world, group = self._meeting.world, self.group
        with world.changed:
            mail, key = self._meeting.mail, (self._rank, source, tag)
            world.wait_until(lambda: bool(mail.get(key)), lambda: [group.world_ranks[source]], group.watch.rank)
            item = mail[key].popleft()
            if not mail[key]:
                del mail[key]  # tags that never repeat must not fill the memory
            return item

    def exchange(self, outgoing: Buffers, incoming: Buffers) -> Exchange:
        for peer, x in outgoing.items():
            self._put(peer, self._ticket(self._rank, peer), x.clone())
        return _Arrivals(self, {(peer, self._ticket(peer, self._rank)): x for peer, x in incoming.items()})

    def _ticket(self, source: int, dest: int) -> int:
        """A tag that no user can choose, and the same at both ends: they start their exchanges in the same order."""
        self._exchanges[source, dest] += 1
        return -self._exchanges[source, dest]

    def equal(self, number: int) -> bool:
        return len(set(self._meeting.all_values(self._rank, number))) == 1

    def bcast_(self, flat: Tensor, root: int) -> None:
        values = self._meeting.all_values(self._rank, flat.clone() if self._rank == root else None)
        if self._rank != root:
            flat.copy_(values[root])

    def allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        parts = self._meeting.all_values(self._rank, flat.clone())
        for room, part in zip(whole.split(list(counts)), parts, strict=True):
            room.copy_(part)

    def allreduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> bool:
        out.copy_(reductions.reduce_in_order(self._meeting.all_values(self._rank, source.clone()), op))
        reductions.scale_(out, scale)
        return True

    def subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> ThreadTransport | None:
        world_ranks, proposals = self.group.world_ranks, None
        if self._rank == 0:
            proposals = {
                c: Meeting(self._meeting.world, [world_ranks[member] for member in members])
                for c, members in members_of.items()
            }
        meetings = self._meeting.all_values(self._rank, proposals)[0]
        return None if color is None else ThreadTransport(self.group.among(members_of[color], name), meetings[color])

    def undelivered(self) -> list[int]:
        return []

    def flush(self) -> Iterable[Pending]:
        return ()  # a message lies in its receiver's box already

    def close(self) -> None: ...


class _Arrivals:
    """An exchange on its way: what this rank has still to take out of its boxes."""

    def __init__(self, transport: ThreadTransport, incoming: Mapping[tuple[int, int], Tensor]):
        self._transport = transport
        self._incoming = incoming  # by peer and ticket

    def wait(self) -> None:
        for (peer, ticket), x in self._incoming.items():
            x.copy_(self._transport.get(peer, ticket))

    def wait_received(self) -> None:
        self.wait()
