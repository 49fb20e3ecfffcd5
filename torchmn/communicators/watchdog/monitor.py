"""The watchdog thread of a rank that is a process: `Monitor`.

A rank whose wait exceeds the timeout requests the state of every rank over the control channel, prints the table and
ends the job. Ranks announce when they leave, and the control channel reports ranks that are lost, so that no rank waits
for them until the timeout.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from torchmn.communicators.watchdog import report
from torchmn.communicators.watchdog.control_channel import ControlClient
from torchmn.communicators.watchdog.observer import Observer
from torchmn.communicators.watchdog.source_lines import line_of_thread
from torchmn.communicators.watchdog.waits import RankState, Wait, Watch

STUCK_STATUS = 124  # as the command `timeout`
_POLL_SECONDS = 0.5
_REPLY_SECONDS = 3.0  # to wait for messages of other ranks
_KNOWN_CAUSE_SECONDS = 1.0  # the same, where a departure already explains the failure
_SAMPLES_APART = 1.0  # seconds between the two samples that show a deadlock
_DEPARTURE_SECONDS = 1.5  # a wait for a rank that left may last this long: its last message may be in flight


class Monitor:
    """One rank's watchdog: a thread that checks the rank's waits and handles messages of the control channel.

    Attributes:
        watch: the waits of this rank.
        size: number of ranks of the job.
        notices_departures: whether a wait for a rank that left ends the job before the timeout.
        serves_others: whether the server of the control channel runs in this process.
        process: id of this rank's process; processes that it forks must not act for it.
        exit_status: the status that this rank's script passed to sys.exit.
        leaving: whether this rank's script has ended.
        ending: whether the watchdog is ending this process.
        observer: of this rank; None if its launcher reports ranks that fail.
        departures: the messages of ranks that have left or were lost, by rank, in the order of their arrival.
    """

    def __init__(
        self,
        watch: Watch,
        hosts: Sequence[str],
        channel: ControlClient | None,
        end_transport: Callable[[int], None],
        timeout: float,
    ):
        self.watch = watch
        self.size = len(hosts)
        self.notices_departures = True
        self.serves_others = False
        self.process = os.getpid()
        self.exit_status = 0
        self.leaving = False
        self.ending = False
        self.observer: Observer | None = None
        self.departures: dict[int, dict[str, Any]] = {}
        self._hosts = hosts
        self._channel = channel
        self._end_transport = end_transport
        self._program_end = ProgramEnd(watch, timeout)
        self._claims: dict[str, int] = {}  # the rank whose claim arrived first
        self._changed = threading.Condition()
        self._states: dict[int, RankState] = {}
        self._sampled = 0  # number of the sample of states that this rank requested last
        self._missing_since: dict[int, float] = {}  # by thread
        self._disconnected = threading.Event()
        self._raising = threading.Lock()
        watch.announce = self.announce_broken

    def start(self) -> None:
        threading.Thread(target=self._run, name="torchmn-watchdog", daemon=True).start()

    def disconnect(self) -> None:
        """Ignores the control channel from now on; the rank's exit is still watched."""
        self._disconnected.set()

    # -- called by the rank's other threads --------------------------------------------------------------------

    def announce_departure(self) -> None:
        """Announces to all ranks that this rank's script has ended, and the collectives and sends that it started."""
        self.leaving = True
        comms = list(self.watch.communicators)
        self._send(
            kind="left",
            status=self.exit_status,
            collectives={comm.name: comm.group.collectives for comm in comms},
            pending=sorted({comm.world_ranks[dest] for comm in comms for dest in comm.transport.undelivered()}),
        )

    def announce_broken(self, communicator: str, reason: str) -> None:
        """Announces to all ranks that a communicator cannot be used for collective operations any more."""
        self._send(kind="broken", communicator=communicator, reason=reason)

    def serve_until_all_left(self) -> None:
        """Returns when all ranks have left, if this process serves the control channel: it must forward to the last.

        MPI_Finalize would wait for them, too, but without running Python's threads.
        """
        if self.serves_others:
            self._program_end.waits_for_ranks = True
            with self._changed:
                self._changed.wait_for(lambda: self._channel is None or len(self.departures) >= self.size)
            self._program_end.waits_for_ranks = False

    def is_first_to(self, action: str) -> bool:
        """Returns whether this rank is the first of the job to claim `action`. All ranks get claims in one order."""
        if self._send(kind="claim", what=action):
            with self._changed:
                self._changed.wait_for(lambda: action in self._claims, timeout=_REPLY_SECONDS)
        return self._claims.get(action, self.watch.rank) == self.watch.rank

    def is_first_to_raise(self) -> bool:
        """Returns whether no other rank, and no other thread of this one, has called this before."""
        return self._raising.acquire(blocking=False) and self.is_first_to("traceback")

    def wait_for_root_cause(self) -> None:
        """Returns when another rank has left, was lost, or prints a traceback; or after a few seconds.

        Connections to a failed rank may break before its message arrives. If ranks have left before, one of them may be
        the cause, and no further message may come.
        """
        with self._changed:
            known = len(self.departures)
            self._changed.wait_for(
                lambda: self._channel is None or self._claims or len(self.departures) > known,
                timeout=_KNOWN_CAUSE_SECONDS if known else _REPLY_SECONDS,
            )

    def end_job(self, status: int) -> None:
        """Ends every rank now; does not return."""
        self.ending = True
        self.announce_end()
        self._send(kind="end", status=status)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.1)  # rank 0's control server ends with this process: let it forward the message
        # This process ends soon, whatever the transport does to end the others.
        threading.Timer(2.0, os._exit, (status,)).start()
        self._end_transport(status)
        os._exit(status)

    def announce_end(self) -> None:
        """Announces to the observer of this host that this rank has reported why it ends."""
        if self.observer is not None:
            self.observer.announce_end()

    def _send(self, **message: Any) -> bool:
        return self._channel is not None and self._channel.send({"rank": self.watch.rank, **message})

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        reporter: threading.Thread | None = None
        while True:
            if self._disconnected.is_set():
                time.sleep(_POLL_SECONDS)
            else:
                self._receive()
            reason = None if reporter else self._reason_to_end() or self._program_end.reason_to_end_job()
            if reason:
                # In another thread, because this one must receive the states of the other ranks.
                reporter = threading.Thread(target=self._report, args=(reason,), name="torchmn-report", daemon=True)
                reporter.start()

    def _receive(self) -> None:
        if self._channel is None:
            time.sleep(_POLL_SECONDS)
            return
        try:
            message = self._channel.receive(_POLL_SECONDS)
        except (EOFError, OSError, ValueError):
            self._channel = None
            message = {"kind": "lost", "rank": 0}  # the server runs in rank 0's process
        if message is not None:
            with self._changed:
                try:
                    self._handle(message)
                except (KeyError, TypeError, ValueError):  # not one of our messages: its sender is out of order
                    self._handle({"kind": "lost", "rank": message["rank"]})
                self._changed.notify_all()

    def _handle(self, message: dict[str, Any]) -> None:
        kind, rank = message["kind"], message["rank"]
        if kind == "claim":
            self._claims.setdefault(message["what"], rank)
        elif kind == "end" and rank != self.watch.rank:
            self.ending = True
            self.announce_end()
            # The sender also ends the job by its transport; this is for transports that cannot.
            threading.Timer(1.0, os._exit, (message["status"],)).start()
        elif kind == "ask":
            self._send(kind="state", sample=message["sample"], state=self.watch.state().as_dict())
        elif kind == "state" and message["sample"] == self._sampled:
            self._states[rank] = RankState.from_dict(message["state"])
        elif kind == "broken":
            self.watch.mark_broken(message["communicator"], rank, message["reason"])
        elif kind == "left":
            self.departures[rank] = message
        elif kind == "lost" and rank not in self.departures:
            self.departures[rank] = message
            first = min(set(range(self.size)) - set(self.departures), default=None)
            if self.watch.rank == first and self.notices_departures and not self.ending:
                # At once: a launcher may be ending this rank, too, and name no rank.
                sys.stderr.write(f"torchmn: {report.departure_text(message)}\n")

    def _reason_to_end(self) -> str | None:
        """Returns why this rank's wait must end the job, or None."""
        wait = self.watch.longest()
        if wait is None:
            self._missing_since.clear()
            return None
        limit = wait.group.settings.timeout
        if monotonic() - wait.since > limit:
            return report.timeout_reason(self.watch.rank, limit, wait.operation)
        if not self.notices_departures:
            return None
        if self.watch.broken and (reason := self._reason_if_broken()):
            return reason
        missing = [rank for rank in sorted(self.departures) if self._is_needed(wait, self.departures[rank])]
        if not missing:
            self._missing_since.clear()
        elif monotonic() - self._missing_since.setdefault(wait.thread, monotonic()) > _DEPARTURE_SECONDS:
            departures = [self.departures[rank] for rank in missing]
            return report.departure_reason(departures, self.watch.rank, wait.operation)
        return None

    def _reason_if_broken(self) -> str | None:
        for wait in tuple(self.watch.waits.values()):
            broken = self.watch.broken_in(wait)
            if broken and monotonic() - max(wait.since, broken.since) > _DEPARTURE_SECONDS:
                return report.broken_reason(broken.reason, self.watch.rank, wait.operation)
        return None

    def _is_needed(self, wait: Wait, departure: dict[str, Any]) -> bool:
        """Returns whether this wait needs something that the rank which left has not sent and cannot send any more."""
        group, rank = wait.group, departure["rank"]
        if wait.peer is not None:
            in_flight = self.watch.rank in departure.get("pending", ())
            return group.world_ranks[wait.peer] == rank and not in_flight
        joined = departure.get("collectives", {}).get(group.name, 0) >= group.collectives
        return rank in group.world_ranks and not joined

    def _report(self, reason: str) -> None:
        """Prints the table and ends the job, unless another rank does."""
        if not self.is_first_to("table"):
            return
        states = self._sample()
        ring: list[int] = []
        if report.cycle(states):
            time.sleep(_SAMPLES_APART)
            before, states = states, self._sample()
            ring = report.lasting_cycle(before, states)
        sys.stderr.write("\n" + report.table(states, reason, ring) + "\n")
        failed = [departure["status"] for departure in self.departures.values() if departure.get("status")]
        status = 1 if self.watch.broken else STUCK_STATUS
        self.end_job(failed[0] if failed else status)

    def _sample(self) -> list[RankState]:
        """Returns the state of every rank; a rank that did not reply is busy in native code, or unreachable."""
        with self._changed:
            self._states.clear()
            self._sampled += 1
        self._send(kind="ask", sample=self._sampled)
        expected = set(range(self.size)) - set(self.departures)
        with self._changed:
            seconds = _REPLY_SECONDS if self._channel else 0
            self._changed.wait_for(lambda: expected <= set(self._states), timeout=seconds)
        states = {self.watch.rank: self.watch.state(), **self._states}
        for rank in range(self.size):
            gone = rank in self.departures
            if rank not in states or (gone and not states[rank].operation and rank != self.watch.rank):
                lost = gone and self.departures[rank]["kind"] == "lost"
                states[rank] = RankState(rank, self._hosts[rank], "", left=gone, lost=lost)
        return list(states.values())


class ProgramEnd:
    """Measures the time since the script of a rank ended, for the watchdog: Python may wait for threads indefinitely.

    Attributes:
        waits_for_ranks: whether the process waits for other ranks to end, which may take any time.
    """

    def __init__(self, watch: Watch, timeout: float):
        self.waits_for_ranks = False
        self._watch = watch
        self._limit = timeout
        self._began: float | None = None

    def reason_to_end_job(self) -> str | None:
        """Returns why the job must be ended: the end takes longer than a wait may. None if it does not."""
        if threading.main_thread().is_alive() or self.waits_for_ranks or self._watch.waits:
            self._began = None
            return None
        if self._began is None:
            self._began = monotonic()
        if monotonic() - self._began <= self._limit:
            return None
        return report.exit_reason(self._watch.rank, self._limit, _unfinished(self._watch.main_thread))


def _unfinished(main_thread: int) -> str:
    """Returns what keeps a process from ending after its script: the threads that Python waits for, or an exit handler.

    With the line of each. Python joins threads that are no daemons before it calls exit handlers.
    """
    main = threading.main_thread()
    threads = [each for each in threading.enumerate() if each is not main and not each.daemon and each.ident]
    if not threads:
        return f"the exit handler at {line_of_thread(main_thread)}"
    return ", ".join(f"thread {each.name!r} at {line_of_thread(each.ident or 0)}" for each in threads)
