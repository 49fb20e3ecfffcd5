"""Ranks as threads of one process: for tests, notebooks and debuggers.

The contract is that of the other transports, the watchdog included. Tensors are copied on their way, so a rank
never sees another rank's memory.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchmn.communicators import reductions, watchdog
from torchmn.communicators.base import Communicator
from torchmn.communicators.buffers import scale_
from torchmn.communicators.settings import Settings
from torchmn.communicators.topology import Place
from torchmn.communicators.transport import Exchange
from torchmn.communicators.watchdog import RankState, Watch, here
from torchmn.communicators.wire import Message
from torchmn.errors import ArgumentError, PeerError, ThreadError, WaitTimeout

Result = TypeVar("Result")

_rank_of_this_thread = threading.local()


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
            # Every operation comes by here in some test: none of them may wait where the watchdog can not see it.
            wait = self.watches[rank].waits.get(threading.get_ident())
            assert wait is not None, "a wait without a note for the watchdog"
            broken = self.watches[rank].broken_in(wait)
            if broken is not None:
                raise (ThreadError if broken.rank == rank else PeerError)(broken.reason)
            if self.failure is not None:
                raise (WaitTimeout if self.timed_out else PeerError)(self.failure)
            gone = self.left.intersection(needed())
            if gone:
                reason = f"rank {watchdog.ranks_text(sorted(gone))} ended while rank {rank} waits for it"
                raise PeerError(watchdog.table(self.states(), reason))
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
                limit = wait.communicator.settings.timeout
                if watchdog.monotonic() - wait.since > limit:
                    reason = f"rank {watch.rank} has waited for {limit:g} s in {wait.operation}; the job is ended"
                    self.fail(watchdog.table(self.states(), reason), timed_out=True)
                    return


class _Meeting:
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


class ThreadCommunicator(Communicator):
    """One rank's communicator in a world of threads."""

    ranks_share_a_process = True

    def __init__(self, place: Place, settings: Settings, meeting: _Meeting):
        super().__init__(place, settings)
        self._meeting = meeting
        self._exchanges: defaultdict[tuple[int, int], int] = defaultdict(int)  # started, by (source, dest)

    def _post(self, message: Message, dest: int, tag: int) -> None:
        message.tensors = tuple(x.clone() for x in message.tensors)
        self._put(dest, tag, message)

    def _take(self, source: int, tag: int) -> Message:
        message, mode = self._get(source, tag), torch.is_inference_mode_enabled()
        # The sender may have been in inference mode, where its copies do not fit into a graph of this rank.
        message.tensors = tuple(x if x.is_inference() == mode else x.clone() for x in message.tensors)
        return message

    def _has_arrived(self, source: int, tag: int) -> bool:
        with self._meeting.world.changed:
            return bool(self._meeting.mail.get((self.rank, source, tag)))

    def _put(self, dest: int, tag: int, item: Any) -> None:
        with self._meeting.world.changed:
            self._meeting.mail[dest, self.rank, tag].append(item)
            self._meeting.world.changed.notify_all()

    def _get(self, source: int, tag: int) -> Any:
        world = self._meeting.world
        with world.changed:
            mail, key = self._meeting.mail, (self.rank, source, tag)
            world.wait_until(lambda: bool(mail.get(key)), lambda: [self._world_ranks[source]], self._watch.rank)
            item = mail[key].popleft()
            if not mail[key]:
                del mail[key]  # tags that never repeat must not fill the memory
            return item

    def _exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        self._start_exchange(outgoing, incoming).wait()

    def _start_exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Exchange:
        for peer, x in outgoing.items():
            self._put(peer, self._ticket(self.rank, peer), x.clone())
        return _Arrivals(self, {(peer, self._ticket(peer, self.rank)): x for peer, x in incoming.items()})

    def _ticket(self, source: int, dest: int) -> int:
        """A tag that no user can choose, and the same at both ends: they start their exchanges in the same order."""
        self._exchanges[source, dest] += 1
        return -self._exchanges[source, dest]

    def _same_everywhere(self, number: int) -> bool:
        return len(set(self._meeting.all_values(self.rank, number))) == 1

    def _barrier(self) -> None:
        self._meeting.all_values(self.rank, None)

    def _bcast_(self, flat: Tensor, root: int) -> None:
        values = self._meeting.all_values(self.rank, flat.clone() if self.rank == root else None)
        if self.rank != root:
            flat.copy_(values[root])

    def _reduces(self, dtype: torch.dtype, op: str) -> bool:
        return True

    def _allreduce_(self, source: Tensor, x: Tensor, op: str, scale: float = 1.0) -> None:
        x.copy_(reductions.reduce_in_order(self._meeting.all_values(self.rank, source.clone()), op))
        scale_(x, scale)

    def _allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        parts = self._meeting.all_values(self.rank, flat.clone())
        for room, part in zip(whole.split(list(counts)), parts, strict=True):
            room.copy_(part)

    def _subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> Communicator | None:
        world = self._meeting.world
        proposals = None
        if self.rank == 0:
            proposals = {
                c: _Meeting(world, [self._world_ranks[member] for member in members])
                for c, members in members_of.items()
            }
        meetings = self._meeting.all_values(self.rank, proposals)[0]
        if color is None:
            return None
        place = self._place.among(members_of[color], name)
        return ThreadCommunicator(place, replace(self.settings), meetings[color])

    def _flush(self) -> None:
        """Nothing to wait for: a message lies in its receiver's box already."""

    def _close(self) -> None: ...


class _Arrivals:
    """An exchange on its way: what this rank has still to take out of its boxes."""

    def __init__(self, comm: ThreadCommunicator, incoming: Mapping[tuple[int, int], Tensor]):
        self._comm = comm
        self._incoming = incoming  # by peer and ticket

    def wait(self) -> None:
        for (peer, ticket), x in self._incoming.items():
            x.copy_(self._comm._get(peer, ticket))

    def wait_received(self) -> None:
        self.wait()


def run_threads(
    fn: Callable[[Communicator], Result],
    size: int,
    hosts: Sequence[str] | None = None,
    *,
    timeout: float | None = None,
    grad_dtype: torch.dtype | None = None,
) -> list[Result]:
    """Run `fn(comm)` on `size` ranks inside this process; return the results in rank order.

    An exception on one rank frees the others and is raised here. `hosts` gives each rank a host name, so that
    topology can be tried without machines. Threads share torch's random state: `torch.manual_seed` inside of `fn` is a
    race. Make models before, or draw from a `torch.Generator` of your own.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise ArgumentError(f"run_threads: expected size to be an int, got {size!r}")
    hosts = ["localhost"] * size if hosts is None else list(hosts)
    if size < 1 or len(hosts) != size:
        raise ArgumentError(
            f"run_threads: expected size >= 1 and one host per rank, got size {size}, {len(hosts)} hosts"
        )
    world = ThreadWorld(hosts)
    meeting = _Meeting(world, range(size))
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []

    def note(rank: int, error: BaseException) -> None:
        errors.append((rank, error))
        world.fail(f"rank {rank} of {size} raised {type(error).__name__}: {error}")

    def rank_main(rank: int) -> None:
        world.watches[rank].main_thread = threading.get_ident()
        settings = Settings(grad_dtype=grad_dtype)
        if timeout is not None:
            settings.timeout = timeout
        comm = ThreadCommunicator(Place.in_world("world", hosts, world.watches[rank]), settings, meeting)
        _rank_of_this_thread.communicator = comm
        try:
            results[rank] = fn(comm)
            _settle([each for each in world.watches[rank].communicators if not each._closed])
            world.leave(rank)
        except BaseException as error:
            note(rank, error)

    ranks = [threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    done = threading.Event()
    watcher = threading.Thread(target=world.watch, args=(done,), name="torchmn watchdog", daemon=True)
    try:
        with _threads_that_fail(world, note):
            for thread in (*ranks, watcher):
                thread.start()
            for thread in ranks:
                while thread.is_alive():
                    thread.join(0.5)
                    if world.timed_out:
                        thread.join(5.0)  # a rank asleep in user code can not be woken; it is left behind
                        break
    except KeyboardInterrupt:
        world.fail("interrupted while ranks were running")  # or they would go on, in a notebook for hours
        raise
    finally:
        done.set()
        if watcher.is_alive():  # a thread that runs while Python ends may abort the process
            watcher.join()
    if errors:
        _raise_first(errors, size)
    if world.timed_out:
        raise WaitTimeout(world.failure)
    return results


@contextmanager
def _threads_that_fail(world: ThreadWorld, note: Callable[[int, BaseException], None]) -> Iterator[None]:
    """A block in which an exception that ends a thread is noted for the rank for which that thread communicated."""
    previous = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        rank = next((watch.rank for watch in world.watches if watch is here.watch), None)
        if rank is None or args.exc_type is SystemExit or args.exc_value is None:
            previous(args)
        else:
            note(rank, args.exc_value)

    threading.excepthook = hook
    try:
        yield
    finally:
        if threading.excepthook is hook:  # else another world, in another thread, has begun meanwhile
            threading.excepthook = previous


def communicator_of_this_thread() -> Communicator | None:
    """The one that `run_threads` gave to this rank; None in threads that are no ranks."""
    return getattr(_rank_of_this_thread, "communicator", None)


def _settle(comms: Sequence[Communicator]) -> None:
    """What `finalize` does for the gradients that are still owed: all ranks answer before they wait."""
    for comm in comms:
        comm._edges.answer_all(comm)
    for comm in comms:
        comm._edges.settle(comm)


def _raise_first(errors: list[tuple[int, BaseException]], size: int) -> None:
    """Raise the error that began it, with its rank noted; errors that only follow from it stay silent."""
    # Ranks that a broken communicator frees may be faster than the thread that broke it.
    rank, error = next((each for each in errors if isinstance(each[1], ThreadError)), errors[0])
    if hasattr(error, "add_note"):  # not in Python 3.10
        error.add_note(f"(raised on rank {rank} of {size})")  # type: ignore[attr-defined]
    raise error
