"""Half-open ranges of indices, and who owns which."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Interval:
    """The indices from `start` up to, and without, `stop`; empty, and false, where `stop` is not beyond `start`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop

    def intersection(self, other: Interval) -> Interval:
        """The indices that are in both; where there are none, Interval(0, 0)."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else Interval(0, 0)

    def shift(self, distance: int) -> Interval:
        """The interval that begins and ends `distance` later."""
        return Interval(self.start + distance, self.stop + distance)

    def as_slice(self) -> slice:
        """This interval as an index of a sequence or a tensor; it must not be negative."""
        return slice(self.start, max(self.start, self.stop))

    def __str__(self) -> str:
        return f"{self.start}..{self.stop - 1}" if self else "nothing"


def owned(extent: int, parts: int, place: int) -> Interval:
    """The indices of a dim of `extent` that part `place` of `parts` owns: balanced, larger parts first."""
    size, larger = divmod(extent, parts)
    start = place * size + min(place, larger)
    return Interval(start, start + size + (place < larger))


def all_owned(extent: int, parts: int) -> tuple[Interval, ...]:
    """What each of `parts` parts owns of a dim of `extent`, in order."""
    return tuple(owned(extent, parts, place) for place in range(parts))
