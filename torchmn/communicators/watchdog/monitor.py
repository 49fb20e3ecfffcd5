"""The watchdog of a job of processes: one quiet thread per rank, on a line of their own.

The rank whose wait lasts too long raises the alarm; every rank then says what it is doing, the one that was
first prints the table, and the job ends. Ranks that leave say so, and ranks that die are missed by the
switchboard, so that nobody waits for them in vain.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from torchmn.communicators.watchdog import waits
from torchmn.communicators.watchdog.control_channel import Line
from torchmn.communicators.watchdog.waits import RankState, Wait, Watch

STUCK_STATUS = 124  # what `timeout` returns, too
_TICK = 0.5
_PATIENCE = 3.0  # for other ranks' answers
_CAUSE_KNOWN = 1.0  # for a better reason than a departure that is known already
_GRACE = 1.5  # a wait for a rank that left is no mistake before this: its last message may be on the way


class Monitor:
    """One rank's thread that watches its waits and answers the others."""

    def __init__(self, watch: Watch, hosts: Sequence[str], line: Line | None, end_transport: Callable[[int], None]):
        self.watch = watch
        self.size = len(hosts)
        self.notices_departures = True
        self.serves_others = False  # whether all ranks speak through this process
        self.process = os.getpid()  # one that it forks must not speak for it
        self.exit_status = 0  # what this rank's script asked for, if it called sys.exit
        self.leaving = False  # whether this rank's script is over
        self.departures: dict[int, dict[str, Any]] = {}
        self._hosts = hosts  # of all ranks
        self._line = line
        self._end_transport = end_transport
        self._first: dict[str, int] = {}  # what was claimed -> the rank whose claim was heard first
        self._heard = threading.Condition()
        self._states: dict[int, RankState] = {}
        self._alone_since: dict[int, float] = {}
        self._over = threading.Event()
        self._raising = threading.Lock()
        watch.announce = self.announce_broken

    def start(self) -> None:
        threading.Thread(target=self._run, name="torchmn watchdog", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    # -- what the rank's own thread says -----------------------------------------------------------------------

    def announce_departure(self) -> None:
        """Tell the others that this rank's script is over, and which collectives and sends it had begun."""
        self.leaving = True
        comms = list(self.watch.communicators)
        self._say(
            kind="left",
            status=self.exit_status,
            collectives={comm.name: comm.group.collectives for comm in comms},
            pending=sorted({comm.world_ranks[dest] for comm in comms for dest in comm.transport.undelivered()}),
        )

    def announce_broken(self, communicator: str, reason: str) -> None:
        """Tell the others that a communicator can not be used for collective operations any more."""
        self._say(kind="broken", communicator=communicator, reason=reason)

    def outlast_the_others(self) -> None:
        """Where all ranks speak through this process: stay until they have left, or they hear of nobody's departure.

        MPI would wait for them too, but with Python's threads at rest.
        """
        if self.serves_others:
            with self._heard:
                self._heard.wait_for(lambda: self._line is None or len(self.departures) >= self.size)

    def first_to(self, what: str) -> bool:
        """Whether this rank is the first of the job to claim `what`: all ranks hear claims in the same order."""
        if self._say(kind="claim", what=what):
            with self._heard:
                self._heard.wait_for(lambda: what in self._first, timeout=_PATIENCE)
        return self._first.get(what, self.watch.rank) == self.watch.rank

    def wait_for_the_cause(self) -> None:
        """Returns when another rank reports why this one lost it: it has left, was lost, or prints a traceback.

        Its connections may break before its report arrives. Where ranks have left before, one of those may be the
        cause, and nothing more may come.
        """
        with self._heard:
            known = len(self.departures)
            self._heard.wait_for(
                lambda: self._line is None or self._first or len(self.departures) > known,
                timeout=_CAUSE_KNOWN if known else _PATIENCE,
            )

    def first_to_raise(self) -> bool:
        """Whether no other rank, and no other thread of this one, has asked this before."""
        return self._raising.acquire(blocking=False) and self.first_to("traceback")

    def end_job(self, status: int) -> None:
        """End every rank now; does not return."""
        self._say(kind="end", status=status)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.1)  # rank 0's switchboard dies with this process: let it repeat the word
        # Whatever the transport does to end the others, this process is over soon.
        threading.Timer(2.0, os._exit, (status,)).start()
        self._end_transport(status)
        os._exit(status)

    def _say(self, **words: Any) -> bool:
        return self._line is not None and self._line.say({"rank": self.watch.rank, **words})

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        alarm: threading.Thread | None = None
        while not self._over.is_set():
            self._listen()
            reason = None if alarm else self._complaint()
            if reason:
                # In a thread of its own, because this one must go on listening to the answers.
                alarm = threading.Thread(target=self._raise_alarm, args=(reason,), name="torchmn alarm", daemon=True)
                alarm.start()

    def _listen(self) -> None:
        if self._line is None:
            time.sleep(_TICK)
            return
        try:
            words = self._line.hear(_TICK)
        except (EOFError, OSError):
            self._line = None
            with self._heard:
                self.departures.setdefault(0, {"kind": "lost", "rank": 0})  # the switchboard was rank 0's
                self._heard.notify_all()
            return
        if words is not None:
            with self._heard:
                self._take_note(words)
                self._heard.notify_all()

    def _take_note(self, words: dict[str, Any]) -> None:
        kind, rank = words["kind"], words["rank"]
        if kind == "claim":
            self._first.setdefault(words["what"], rank)
        elif kind == "end" and rank != self.watch.rank:
            # The rank that speaks ends the job, by its transport too; this is for transports that can not.
            threading.Timer(1.0, os._exit, (words["status"],)).start()
        elif kind == "ask":
            self._say(kind="state", state=self.watch.state().as_dict())
        elif kind == "state":
            self._states[rank] = RankState.from_dict(words["state"])
        elif kind == "broken":
            self.watch.mark_broken(words["communicator"], rank, words["reason"])
        elif kind == "left":
            self.departures[rank] = words
        elif kind == "lost":
            self.departures.setdefault(rank, words)

    def _complaint(self) -> str | None:
        """Why this rank's wait must end the job, or None."""
        wait = self.watch.longest()
        if wait is None:
            self._alone_since.clear()
            return None
        limit = wait.group.settings.timeout
        if monotonic() - wait.since > limit:
            return f"rank {self.watch.rank} has waited for {limit:g} s in {wait.operation}; the job is ended"
        missing = [rank for rank in sorted(self.departures) if self._lacks(wait, self.departures[rank])]
        if not self.notices_departures:
            return None
        if self.watch.broken and (reason := self._broken_wait()):
            return reason
        if not missing:
            self._alone_since.clear()
        elif monotonic() - self._alone_since.setdefault(wait.thread, monotonic()) > _GRACE:
            fates = "; ".join(fate(self.departures[rank]) for rank in missing)
            return f"{fates}; rank {self.watch.rank} waits for it in {wait.operation}; the job is ended"
        return None

    def _broken_wait(self) -> str | None:
        for wait in tuple(self.watch.waits.values()):
            broken = self.watch.broken_in(wait)
            if broken and monotonic() - max(wait.since, broken.since) > _GRACE:
                waiting = f"rank {self.watch.rank} waits in {wait.operation} of that communicator; the job is ended"
                return f"{broken.reason}; {waiting}"
        return None

    def _lacks(self, wait: Wait, departure: dict[str, Any]) -> bool:
        """Whether the rank that left can no longer give what this wait needs."""
        group, rank = wait.group, departure["rank"]
        if wait.peer is not None:
            still_coming = self.watch.rank in departure.get("pending", ())
            return group.world_ranks[wait.peer] == rank and not still_coming
        joined = departure.get("collectives", {}).get(group.name, 0) >= group.collectives
        return rank in group.world_ranks and not joined

    def _raise_alarm(self, reason: str) -> None:
        if not self.first_to("table"):
            return  # another rank prints the table and ends the job
        self._say(kind="ask")
        expected = set(range(self.size)) - set(self.departures)
        with self._heard:
            self._heard.wait_for(lambda: expected <= set(self._states), timeout=_PATIENCE if self._line else 0)
        sys.stderr.write("\n" + waits.table(self._all_states(), reason) + "\n")
        failed = [departure["status"] for departure in self.departures.values() if departure.get("status")]
        status = 1 if self.watch.broken else STUCK_STATUS
        self.end_job(failed[0] if failed else status)  # departures are in the order in which they were heard

    def _all_states(self) -> list[RankState]:
        """What every rank is doing; a rank that did not answer is busy in native code, or unreachable."""
        states = {self.watch.rank: self.watch.state(), **self._states}
        for rank in range(self.size):
            gone = rank in self.departures
            if rank not in states or (gone and not states[rank].operation):
                states[rank] = RankState(rank, self._hosts[rank], "", left=gone)
        return list(states.values())


def fate(departure: dict[str, Any]) -> str:
    """A few words on what became of a rank."""
    if departure["kind"] == "lost":
        how = "was lost (killed or crashed, or its host is cut off)"
    elif departure.get("status"):
        how = f"left with status {departure['status']} (its script called sys.exit)"
    else:
        how = "left (its script ended or called sys.exit)"
    return f"rank {departure['rank']} {how}"
