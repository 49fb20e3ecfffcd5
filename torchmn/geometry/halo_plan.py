"""A halo exchange as one rank sees it: boxes to send, to receive, to copy and to pad. Integers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from torchmn.errors import HaloError
from torchmn.geometry.dim_plan import DimPlan, Segment
from torchmn.geometry.interval import Interval

Box = tuple[Interval, ...]


@dataclass(frozen=True)
class BoxCopy:
    """A box of a buffer, and the box of an owner's part that fills it.

    steps: per dim, 1 as it lies, -1 in reverse order, 0 one index repeated: the source is then 1 long there
    """

    target: Box
    source: Box
    steps: tuple[int, ...]

    @cached_property
    def target_slices(self) -> tuple:
        """How to index the buffer, its leading dims whole."""
        return (..., *(interval.as_slice() for interval in self.target))

    @cached_property
    def source_slices(self) -> tuple:
        """How to index the owner's part, its leading dims whole."""
        return (..., *(interval.as_slice() for interval in self.source))

    @cached_property
    def source_shape(self) -> tuple[int, ...]:
        return tuple(len(interval) for interval in self.source)

    @cached_property
    def target_shape(self) -> tuple[int, ...]:
        return tuple(len(interval) for interval in self.target)

    @cached_property
    def elements(self) -> int:
        """How many elements travel, per element of the leading dims."""
        return prod(self.source_shape)

    @cached_property
    def reversed_dims(self) -> tuple[int, ...]:
        """The dims, counted from the last (-1), that are filled in reverse order."""
        return tuple(dim - len(self.steps) for dim, step in enumerate(self.steps) if step == -1)

    @cached_property
    def repeated_dims(self) -> tuple[int, ...]:
        """The dims, counted from the last (-1), in which one index fills all."""
        return tuple(dim - len(self.steps) for dim, step in enumerate(self.steps) if step == 0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether the box is copied as it lies."""
        return all(step == 1 for step in self.steps)


@dataclass(frozen=True)
class HaloPlan:
    """What the rank at `place` sends, receives, copies and pads so that its buffer holds all that it needs.

    Ranks are numbered row-major over the places of the dims. Every rank works out its own plan from the same dims,
    and the plans fit: box i that a rank sends to a peer is box i that the peer receives from it.
    """

    dims: tuple[DimPlan, ...]
    place: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.place) != len(self.dims) or any(
            not 0 <= place < dim.parts for place, dim in zip(self.place, self.dims, strict=True)
        ):
            raise HaloError(f"expected a place in a grid of {self.grid_shape}, got {self.place}")

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(dims: tuple[DimPlan, ...], place: tuple[int, ...]) -> HaloPlan:
        """The plan, made once: the same arguments give the same object, with its boxes worked out."""
        return HaloPlan(dims, place)

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.place))

    def __hash__(self) -> int:  # plans are looked up at every step: hash their many integers once
        return self._hash

    @cached_property
    def grid_shape(self) -> tuple[int, ...]:
        return tuple(dim.parts for dim in self.dims)

    @cached_property
    def size(self) -> int:
        """How many ranks take part."""
        return prod(self.grid_shape)

    @cached_property
    def rank(self) -> int:
        return self.rank_of(self.place)

    def rank_of(self, place: Iterable[int]) -> int:
        """The rank at a place of the grid."""
        rank = 0
        for at, parts in zip(place, self.grid_shape, strict=True):
            rank = rank * parts + at
        return rank

    @cached_property
    def owned_shape(self) -> tuple[int, ...]:
        """This rank's part, in the planned dims."""
        return tuple(len(dim.owned[at]) for dim, at in zip(self.dims, self.place, strict=True))

    @cached_property
    def buffer_shape(self) -> tuple[int, ...]:
        """All that this rank needs, padding included, in the planned dims."""
        return tuple(len(dim.needed[at]) for dim, at in zip(self.dims, self.place, strict=True))

    @cached_property
    def receives(self) -> dict[int, tuple[BoxCopy, ...]]:
        """The boxes that come from each peer, in the order in which they lie in its message."""
        return {rank: boxes for rank, boxes in self._sources.items() if rank != self.rank}

    @cached_property
    def local(self) -> tuple[BoxCopy, ...]:
        """The boxes that this rank takes from its own part."""
        return self._sources.get(self.rank, ())

    @cached_property
    def sends(self) -> dict[int, tuple[BoxCopy, ...]]:
        """The boxes that go to each peer, in the order in which they lie in its message."""
        sends = {}
        for peer in product(*(range(dim.parts) for dim in self.dims)):
            if peer == self.place:
                continue
            mine = [
                [segment for segment in dim.segments[there] if segment.owner == here]
                for dim, there, here in zip(self.dims, peer, self.place, strict=True)
            ]
            boxes = tuple(_box(segments) for segments in product(*mine))
            if boxes:
                sends[self.rank_of(peer)] = boxes
        return sends

    @cached_property
    def padding(self) -> tuple[Box, ...]:
        """The boxes of the buffer that are constant padding; they do not overlap."""
        whole = [Interval(0, length) for length in self.buffer_shape]
        inside = [dim.inside(at) for dim, at in zip(self.dims, self.place, strict=True)]
        boxes = []
        for at, (full, middle) in enumerate(zip(whole, inside, strict=True)):
            outer = [Interval(0, middle.start), Interval(middle.stop, full.stop)] if middle else [full]
            boxes += [(*inside[:at], side, *whole[at + 1 :]) for side in outer]
        return tuple(box for box in boxes if all(box))

    @cached_property
    def padding_slices(self) -> tuple[tuple, ...]:
        """How to index the buffer for each padding box, its leading dims whole."""
        return tuple((..., *(interval.as_slice() for interval in box)) for box in self.padding)

    @cached_property
    def anyone_exchanges(self) -> bool:
        """Whether any rank needs anything from another one; the same on all ranks."""
        owners = [
            {(place, s.owner) for place, segments in enumerate(dim.segments) for s in segments if s.owner is not None}
            for dim in self.dims
        ]
        return all(owners) and any(place != owner for pairs in owners for place, owner in pairs)

    @cached_property
    def is_view(self) -> bool:
        """Whether the whole buffer is one box of this rank's own part, as it lies."""
        return not self.receives and not self.padding and len(self.local) == 1 and self.local[0].is_plain

    @cached_property
    def is_identity(self) -> bool:
        """Whether every rank needs exactly what it owns, so that there is nothing to do at all."""
        return all(mine == needed or not (mine or needed) for dim in self.dims for mine, needed in _places(dim))

    @cached_property
    def _sources(self) -> dict[int, tuple[BoxCopy, ...]]:
        mine = [
            [segment for segment in dim.segments[at] if segment.owner is not None]
            for dim, at in zip(self.dims, self.place, strict=True)
        ]
        sources: dict[int, list[BoxCopy]] = {}
        for segments in product(*mine):
            owner = self.rank_of(segment.owner for segment in segments if segment.owner is not None)
            sources.setdefault(owner, []).append(_box(segments))
        return {rank: tuple(boxes) for rank, boxes in sources.items()}

    def __str__(self) -> str:
        lines = [f"halo plan of rank {self.rank} of {self.size}, at {self.place} of {self.grid_shape}"]
        for number, (dim, at) in enumerate(zip(self.dims, self.place, strict=True)):
            mode = "" if dim.padding_mode == "zeros" else f", padding {dim.padding_mode}"
            lines.append(f"  dim {number} of {dim.extent}: owns {dim.owned[at]}, needs {dim.needed[at]}{mode}")
        lines += [f"  own part   {_arrow(box)}" for box in self.local]
        lines += [f"  to rank {peer}   {_text(box.source)}" for peer, boxes in self.sends.items() for box in boxes]
        lines += [f"  from rank {peer} {_arrow(box)}" for peer, boxes in self.receives.items() for box in boxes]
        lines += [f"  padding    {_text(box)}" for box in self.padding]
        return "\n".join(lines)


def _places(dim: DimPlan) -> Iterable[tuple[Interval, Interval]]:
    return zip(dim.owned, dim.needed, strict=True)


def _box(segments: Iterable[Segment]) -> BoxCopy:
    segments = tuple(segments)
    return BoxCopy(
        tuple(segment.target for segment in segments),
        tuple(segment.source for segment in segments),
        tuple(segment.step for segment in segments),
    )


def _text(box: Box) -> str:
    return "[" + ", ".join(str(interval) for interval in box) + "]"


def _arrow(box: BoxCopy) -> str:
    manner = "" if box.is_plain else f"  (steps {box.steps})"
    return f"{_text(box.source)} -> buffer {_text(box.target)}{manner}"
