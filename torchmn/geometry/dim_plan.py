"""DimPlan: the halo exchange along one dim. For each part of the dim: the owner of each index that it needs."""

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
    """Consecutive indices of a buffer that are copied from one owner.

    Attributes:
        target: indices in the buffer.
        owner: number of the part that they are copied from; None for constant padding.
        source: indices in the owner's part; as many as in `target`, or one if `step` is 0.
        step: 1 for the same order, -1 for the reverse order, 0 for one index that is repeated.
    """

    target: Interval
    owner: int | None
    source: Interval
    step: int = 1


@dataclass(frozen=True)
class DimPlan:
    """The indices that each part of one dim owns and needs.

    Attributes:
        extent: length of the whole dim.
        owned: global indices that each part owns; together exactly 0..extent-1, in order.
        needed: global indices that each part needs. Indices outside of 0..extent-1 are padding.
        padding_mode: "zeros" (a constant), "reflect", "replicate" or "circular".

    Raises:
        HaloError: if the parts do not cover the dim, or the padding mode does not exist.
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
            raise HaloError(f"expected needed indices for {len(self.owned)} parts, got {len(self.needed)} intervals")

    @staticmethod
    @lru_cache(maxsize=4096)
    def of_window(
        extent: int, parts: int, window: Window, padding_mode: str = "zeros", name: str | None = None
    ) -> DimPlan:
        """Returns the plan for a window. Inputs and outputs are cut into `parts` balanced parts.

        Args:
            extent: length of the input.
            parts: number of parts.
            window: of the layer, along this dim.
            padding_mode: see the class.
            name: of the module, for error messages.

        Returns:
            The plan of all parts.

        Raises:
            HaloError: if the image is smaller than the window, or than its padding needs.
        """
        outputs = all_owned(window.output_extent(extent, name), parts)
        needed = tuple(window.needed(interval, extent) for interval in outputs)
        plan = DimPlan(extent, all_owned(extent, parts), needed, padding_mode)
        plan.check(name)
        return plan

    @property
    def parts(self) -> int:
        return len(self.owned)

    def check(self, name: str | None = None) -> None:
        """Raises a HaloError, with the module's `name`, if the padding is wider than its mode allows."""
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
        """For each part, the segments that fill its buffer, in order."""
        self.check()
        return tuple(tuple(self._segments(needed)) for needed in self.needed)

    def inside(self, place: int) -> Interval:
        """Returns the indices of a part's buffer that are not constant padding."""
        filled = [segment.target for segment in self.segments[place] if segment.owner is not None]
        return Interval(filled[0].start, filled[-1].stop) if filled else Interval(0, 0)

    def _segments(self, needed: Interval) -> Iterator[Segment]:
        """Yields the segments of `needed`: below, inside and above the image, each cut at the borders of the owners."""
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
        """Yields the segments that copy the global indices `source` to `target`, in the order of the target."""
        places = range(self.parts) if step >= 0 else range(self.parts - 1, -1, -1)
        at = target.start
        for place in places:
            owned = self.owned[place]
            common = owned.intersection(source)
            if not common:
                continue
            length = len(target) if step == 0 else len(common)
            yield Segment(Interval(at, at + length), place, common.shift(-owned.start), step)
            at += length

    def __str__(self) -> str:
        mode = "" if self.padding_mode == "zeros" else f", {self.padding_mode}"
        places = zip(self.owned, self.needed, strict=True)
        return f"{self.extent}{mode}: " + "; ".join(f"owns {owned}, needs {needed}" for owned, needed in places)


def _clipped(needed: Interval, extent: int) -> Interval:
    return Interval(max(needed.start, 0), min(needed.stop, extent))


def _listed(intervals: tuple[Interval, ...]) -> str:
    return ", ".join(str(interval) for interval in intervals)
