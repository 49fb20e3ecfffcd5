"""Clock: measures the time of training steps on each rank, divided into computation and communication."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from torchmn.communicators.communicator import Communicator, seconds_waited


@dataclass(frozen=True)
class RankTime:
    """Seconds that one rank spent on computation, on exchanging data, and on waiting for slower ranks."""

    compute: float
    exchange: float
    waiting: float


class Clock:
    """Accumulates the time of training steps: `with clock: ...` around each."""

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.total = self.communication = 0.0

    def __enter__(self) -> Clock:
        self._began, self._before = monotonic(), seconds_waited(self.comm)
        return self

    def __exit__(self, *_: object) -> None:
        self.total += monotonic() - self._began
        self.communication += seconds_waited(self.comm) - self._before

    def of_all_ranks(self) -> list[RankTime]:
        """Returns the times of each rank. Every rank must call it.

        The shortest communication time of all ranks counts as exchange; the excess of other ranks, as waiting.
        """
        times = self.comm.allgather_obj((self.total, self.communication))
        least = min(communication for _, communication in times)
        return [RankTime(total - communication, least, communication - least) for total, communication in times]
