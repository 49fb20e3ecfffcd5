"""How long the steps of a training take on this rank, and how much of that it spends on communication."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from torchmn.communicators.communicator import Communicator, seconds_waited


@dataclass(frozen=True)
class RankTime:
    """Seconds of one rank: computing, exchanging data, and waiting for slower ranks."""

    compute: float
    exchange: float
    waiting: float


class Clock:
    """Adds up the time of steps: `with clock: ...` around each."""

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
        """The times of each rank; every rank must call it.

        The rank that spends least on communication waits least: what others spend more than it counts as waiting.
        """
        told = self.comm.allgather_obj((self.total, self.communication))
        least = min(communication for _, communication in told)
        return [RankTime(total - communication, least, communication - least) for total, communication in told]
