"""How long the steps of a training take on this rank, and how much of that it spends on communication."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import Any

from torchmn.communicators.base import Communicator


class TimedWaits(dict[int, Any]):
    """The waits of a rank, which adds up how long they last. Only outermost ones are removed: those count."""

    seconds = 0.0

    def __delitem__(self, thread: int) -> None:
        self.seconds += monotonic() - self[thread].since
        super().__delitem__(thread)


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
        waits = comm._watch.waits
        self._waits = waits if isinstance(waits, TimedWaits) else TimedWaits(waits)
        comm._watch.waits = self._waits

    def __enter__(self) -> Clock:
        self._began, self._before = monotonic(), self._waits.seconds
        return self

    def __exit__(self, *_: object) -> None:
        self.total += monotonic() - self._began
        self.communication += self._waits.seconds - self._before

    def of_all_ranks(self) -> list[RankTime]:
        """The times of each rank; every rank must call it.

        The rank that spends least on communication waits least: what others spend more than it counts as waiting.
        """
        told = self.comm.allgather_obj((self.total, self.communication))
        least = min(communication for _, communication in told)
        return [RankTime(total - communication, least, communication - least) for total, communication in told]
