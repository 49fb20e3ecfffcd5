"""One dim of a halo exchange: for every place along it, where each needed index comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torchmn.errors import HaloError, nearest
from torchmn.geometry.interval import Interval, all_owned
from torchmn.geometry.window import Window, named

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


@dataclass(frozen=True)
class Segment:
    """A run of a place's buffer that is filled in one go.

    target: in the buffer
    owner: the place that it comes from; None for a constant
    source: in the owner's part; as long as the target, or one index where `step` is 0
    step: 1 as it lies, -1 in reverse order, 0 the same index again and again
    """

    target: Interval
    owner: int | None
    source: Interval
    step: int = 1


@dataclass(frozen=True)
class DimPlan:
    """What every place along one dim owns, and what it needs, in global indices.

    extent: of the whole dim
    owned: of each place; together exactly the dim, in order
    needed: of each place, also beyond the ends: that is padding, filled as `padding_mode` says
    """

    extent: int
    owned: tuple[Interval, ...]
    needed: tuple[Interval, ...]
    padding_mode: str = "zeros"

    def __post_init__(self) -> None:
        if self.padding_mode not in PADDING_MODES:
            raise HaloError(
                f"padding_mode {self.padding_mode!r} does not exist. {nearest(self.padding_mode, PADDING_MODES)}"
            )
        stops = [0, *(interval.stop for interval in self.owned)]
        if [interval.start for interval in self.owned] != stops[:-1] or stops[-1] != self.extent:
            raise HaloError(f"expected parts that cover 0..{self.extent - 1} in order, got {_listed(self.owned)}")
        if len(self.needed) != len(self.owned):
            raise HaloError(f"expected what {len(self.owned)} places need, got {len(self.needed)} intervals")

    @staticmethod
    @lru_cache(maxsize=4096)
    def of_window(
        extent: int, parts: int, window: Window, padding_mode: str = "zeros", name: str | None = None
    ) -> DimPlan:
        """The plan of a dim in `parts` balanced parts for a window whose outputs are in balanced parts too.

        An image that is smaller than the window is a HaloError with the module's `name`.
        """
        outputs = all_owned(window.output_extent(extent, name), parts)
        needed = tuple(window.needed(mine, extent) for mine in outputs)
        plan = DimPlan(extent, all_owned(extent, parts), needed, padding_mode)
        plan.check(name)
        return plan

    @property
    def parts(self) -> int:
        return len(self.owned)

    def check(self, name: str | None = None) -> None:
        """HaloError, with the module's `name`, if the padding reaches further than its mode can fill."""
        limits = {"reflect": self.extent - 1, "circular": self.extent, "replicate": None if self.extent else 0}
        limit = limits.get(self.padding_mode)
        reach = max((max(-n.start, n.stop - self.extent) for n in self.needed if n), default=0)
        if limit is not None and reach > limit:
            raise HaloError(
                f"{named(name)}(padding_mode {self.padding_mode!r}) needs {reach} indices beyond an image of "
                f"{self.extent}, which gives at most {max(limit, 0)}. Use less padding, padding_mode 'zeros', or a "
                "larger image."
            )

    @cached_property
    def segments(self) -> tuple[tuple[Segment, ...], ...]:
        """For each place, its buffer from the first index to the last."""
        self.check()
        return tuple(tuple(self._segments(needed)) for needed in self.needed)

    def inside(self, place: int) -> Interval:
        """The part of a place's buffer that is not constant padding."""
        filled = [segment.target for segment in self.segments[place] if segment.owner is not None]
        return Interval(filled[0].start, filled[-1].stop) if filled else Interval(0, 0)

    def _segments(self, needed: Interval) -> Iterator[Segment]:
        """What fills `needed`: its runs below, inside and above the image, each cut at the borders of the owners."""
        if not needed:
            return
        for run in (Interval(needed.start, min(needed.stop, 0)), _clipped(needed, self.extent)):
            yield from self._run(run, needed.start)
        yield from self._run(Interval(max(needed.start, self.extent), needed.stop), needed.start)

    def _run(self, run: Interval, buffer_start: int) -> Iterator[Segment]:
        if not run:
            return
        target = run.shift(-buffer_start)
        inside = 0 <= run.start < self.extent
        if inside or self.padding_mode == "circular":
            wrapped = run.shift(0 if inside else -self.extent if run.start >= self.extent else self.extent)
            yield from self._owners(target, wrapped, 1)
        elif self.padding_mode == "zeros":
            yield Segment(target, None, Interval(0, 0), 0)
        elif self.padding_mode == "replicate":
            edge = 0 if run.start < 0 else self.extent - 1
            yield from self._owners(target, Interval(edge, edge + 1), 0)
        else:
            turn = 0 if run.start < 0 else 2 * (self.extent - 1)  # index i mirrors turn - i
            yield from self._owners(target, Interval(turn - run.stop + 1, turn - run.start + 1), -1)

    def _owners(self, target: Interval, source: Interval, step: int) -> Iterator[Segment]:
        """The segments of a run that takes the global indices `source`, in the order of the target."""
        places = range(self.parts) if step >= 0 else range(self.parts - 1, -1, -1)
        at = target.start
        for place in places:
            mine = self.owned[place]
            common = mine.intersection(source)
            if not common:
                continue
            length = len(target) if step == 0 else len(common)
            yield Segment(Interval(at, at + length), place, common.shift(-mine.start), step)
            at += length

    def __str__(self) -> str:
        mode = "" if self.padding_mode == "zeros" else f", {self.padding_mode}"
        places = zip(self.owned, self.needed, strict=True)
        return f"{self.extent}{mode}: " + "; ".join(f"owns {mine}, needs {needed}" for mine, needed in places)


def _clipped(needed: Interval, extent: int) -> Interval:
    return Interval(max(needed.start, 0), min(needed.stop, extent))


def _listed(intervals: tuple[Interval, ...]) -> str:
    return ", ".join(str(interval) for interval in intervals)
