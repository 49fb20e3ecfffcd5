"""The watchdog of a job of processes: one quiet thread per rank, and a small store on rank 0 that they share.

While nothing waits, a rank only looks every half second whether somebody raised the alarm. The rank whose wait
lasts too long raises it: every rank then puts down what it is doing, the first one prints the table, and the
job ends. Ranks that leave say so, so that nobody waits for them in vain.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

from torch.distributed import TCPStore

from torchmn.communicators import watchdog
from torchmn.communicators.watchdog import RankState, Wait, Watch

TICK = 0.5
STUCK_STATUS = 124  # what `timeout` returns, too
_PATIENCE = 3.0  # for other ranks' answers
_GRACE = 1.5  # a wait for a rank that left is no mistake before this: its last message may be on the way


class Monitor:
    """One rank's thread that watches its waits and answers the others."""

    def __init__(self, watch: Watch, size: int, store: TCPStore | None, end_job: Callable[[int], None]):
        self.watch = watch
        self.size = size
        self._store = store
        self._end_transport = end_job
        self._answered = False
        self._alone_since: dict[int, float] = {}
        self._departures: list[dict] = []
        self.notices_departures = True
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchmn watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()

    # -- what the rank's own thread tells ----------------------------------------------------------------------

    def announce_departure(self) -> None:
        """Tell the others that this rank's script is over, and which collectives and sends it had begun."""
        comms = list(self.watch.communicators)
        record = {
            "rank": self.watch.rank,
            "collectives": {comm.name: comm._collectives for comm in comms},
            "pending": sorted({comm._world_ranks[dest] for comm in comms for dest in comm._undelivered()}),
        }
        with _store_trouble_ignored():
            if self._store is not None:
                number = self._store.add("departures", 1)
                self._store.set(f"departure/{number}", json.dumps(record))

    def first_to(self, what: str) -> bool:
        """Whether this rank is the first of the job to claim `what`."""
        with _store_trouble_ignored():
            return self._store is None or self._store.add(f"claim/{what}", 1) == 1
        return True

    def end_job(self, status: int) -> None:
        """End every rank now; does not return."""
        with _store_trouble_ignored():
            if self._store is not None:
                self._store.set("alarm", f"end {status}")
        sys.stdout.flush()
        sys.stderr.flush()
        # Whatever the transport does to end the others, this process is over soon.
        threading.Timer(2.0, os._exit, (status,)).start()
        self._end_transport(status)
        os._exit(status)

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._done.wait(TICK):
            try:
                self._look()
            except Exception:  # the store is gone, and rank 0 with it
                if self._done.is_set():
                    return
                self._store = None
                self._departures.append({"rank": 0, "collectives": {}, "pending": []})

    def _look(self) -> None:
        if self._store is not None and self._store.check(["alarm"]):
            self._answer(self._store.get("alarm").decode())
        wait = self.watch.longest()
        if wait is None:
            self._alone_since.clear()
            return
        waited = monotonic() - wait.since
        limit = wait.communicator.settings.timeout
        if waited > limit:
            self._raise_alarm(f"rank {self.watch.rank} has waited for {limit:g} s in {wait.operation}; the job is ended")
        elif waited > TICK and self.notices_departures:
            self._look_for_departures(wait)

    def _answer(self, alarm: str) -> None:
        if alarm.startswith("end"):
            os._exit(int(alarm.split()[1]))
        if not self._answered and self._store is not None:
            self._answered = True
            self._store.set(f"state/{self.watch.rank}", json.dumps(self.watch.state().as_dict()))

    def _look_for_departures(self, wait: Wait) -> None:
        if self._store is not None:
            for number in range(len(self._departures) + 1, self._store.add("departures", 0) + 1):
                self._departures.append(json.loads(self._store.get(f"departure/{number}")))
        missing = sorted(d["rank"] for d in self._departures if self._lacks(wait, d))
        if not missing:
            self._alone_since.clear()
        elif monotonic() - self._alone_since.setdefault(wait.thread, monotonic()) > _GRACE:
            ranks = watchdog.ranks_text(missing)
            self._raise_alarm(
                f"rank {ranks} left (its script ended or called sys.exit) while rank {self.watch.rank} waits for it "
                f"in {wait.operation}; the job is ended"
            )

    def _lacks(self, wait: Wait, departure: dict) -> bool:
        """Whether the rank that left can no longer give what this wait needs."""
        comm, rank = wait.communicator, departure["rank"]
        if wait.peer is not None:
            return comm._world_ranks[wait.peer] == rank and self.watch.rank not in departure["pending"]
        return rank in comm._world_ranks and departure["collectives"].get(comm.name, 0) < comm._collectives

    def _raise_alarm(self, reason: str) -> None:
        if not self.first_to("table"):
            time.sleep(2 * _PATIENCE)  # the first one prints and ends the job
            os._exit(STUCK_STATUS)
        if self._store is not None:
            self._store.set("alarm", "report")
        sys.stderr.write("\n" + watchdog.table(self._all_states(), reason) + "\n")
        sys.stderr.flush()
        self.end_job(STUCK_STATUS)

    def _all_states(self) -> list[RankState]:
        """What every rank is doing; a rank that does not answer in time is busy in native code, or dead."""
        states = {self.watch.rank: self.watch.state()}
        for departure in self._departures:
            states[departure["rank"]] = RankState(departure["rank"], "", "", left=True)
        deadline = monotonic() + _PATIENCE
        while self._store is not None and len(states) < self.size and monotonic() < deadline:
            time.sleep(0.05)
            for rank in set(range(self.size)) - set(states):
                if self._store.check([f"state/{rank}"]):
                    states[rank] = RankState.from_dict(json.loads(self._store.get(f"state/{rank}")))
        silent = set(range(self.size)) - set(states)
        return [*states.values(), *(RankState(rank, "?", "") for rank in silent)]


class _store_trouble_ignored:  # noqa: N801 - reads as a sentence: with _store_trouble_ignored()
    """The store dies with rank 0; what remains to be done must be done without it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, Exception)


def open_store(host: str) -> TCPStore:
    """The store that rank 0 serves, on a free port of its host."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def join_store(host: str, port: int) -> TCPStore:
    """A connection to the store of rank 0."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
