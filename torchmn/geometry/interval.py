"""Half-open ranges of indices, and the balanced division of a dim into them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Interval:
    """The indices `start <= index < stop`. Empty, and false, if `stop <= start`.

    Attributes:
        start: first index; may be negative, for padding.
        stop: one after the last index.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop

    def intersection(self, other: Interval) -> Interval:
        """Returns the indices that are in both; `Interval(0, 0)` if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else Interval(0, 0)

    def shift(self, distance: int) -> Interval:
        """Returns the interval with `distance` added to both ends."""
        return Interval(self.start + distance, self.stop + distance)

    def as_slice(self) -> slice:
        """Returns the slice of these indices; `start` must not be negative."""
        return slice(self.start, max(self.start, self.stop))

    def __str__(self) -> str:
        return f"{self.start}..{self.stop - 1}" if self else "nothing"


def owned(extent: int, parts: int, place: int) -> Interval:
    """Returns the indices of a dim that one part owns: balanced, larger parts first.

    Args:
        extent: length of the dim.
        parts: into how many parts it is cut.
        place: number of the part, from 0.

    Returns:
        The interval, empty if there are more parts than indices.
    """
    size, larger = divmod(extent, parts)
    start = place * size + min(place, larger)
    return Interval(start, start + size + (place < larger))


def all_owned(extent: int, parts: int) -> tuple[Interval, ...]:
    """Returns the indices that each part of a dim owns, in order.

    Args:
        extent: length of the dim.
        parts: into how many balanced parts it is cut.

    Returns:
        One interval per part.
    """
    return tuple(owned(extent, parts, place) for place in range(parts))
