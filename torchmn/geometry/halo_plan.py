"""HaloPlan: the halo exchange of one rank. Which boxes it sends, receives, copies and pads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from types import EllipsisType

from torchmn.errors import HaloError
from torchmn.geometry.dim_plan import DimPlan, Segment
from torchmn.geometry.interval import Interval

Box = tuple[Interval, ...]
Index = tuple[EllipsisType | slice, ...]


@dataclass(frozen=True)
class BoxCopy:
    """A box of a buffer, and the box of its owner's tile that it is copied from.

    Attributes:
        target: the box in the buffer.
        source: the box in the owner's tile.
        steps: per dim, 1 for the same order, -1 for the reverse order, 0 for one index that is repeated.
    """

    target: Box
    source: Box
    steps: tuple[int, ...]

    @cached_property
    def target_slices(self) -> Index:
        """Index of the box in the buffer, with all of the leading dims."""
        return (..., *(interval.as_slice() for interval in self.target))

    @cached_property
    def source_slices(self) -> Index:
        """Index of the box in the owner's tile, with all of the leading dims."""
        return (..., *(interval.as_slice() for interval in self.source))

    @cached_property
    def source_shape(self) -> tuple[int, ...]:
        return tuple(len(interval) for interval in self.source)

    @cached_property
    def target_shape(self) -> tuple[int, ...]:
        return tuple(len(interval) for interval in self.target)

    @cached_property
    def elements(self) -> int:
        """How many elements are sent, per element of the leading dims."""
        return prod(self.source_shape)

    @cached_property
    def reversed_dims(self) -> tuple[int, ...]:
        """The dims, counted from the last (-1), that are copied in reverse order."""
        return tuple(dim - len(self.steps) for dim, step in enumerate(self.steps) if step == -1)

    @cached_property
    def repeated_dims(self) -> tuple[int, ...]:
        """The dims, counted from the last (-1), in which one index is repeated."""
        return tuple(dim - len(self.steps) for dim, step in enumerate(self.steps) if step == 0)

    @cached_property
    def is_plain(self) -> bool:
        """Whether no dim is reversed or repeated."""
        return all(step == 1 for step in self.steps)


@dataclass(frozen=True)
class HaloPlan:
    """The boxes that one rank sends, receives, copies and pads to fill its buffer with all that it needs.

    Ranks are numbered row-major over the parts of the dims. Each rank computes its plan from the same dims, and plans
    match: box i that a rank sends to a peer is box i that the peer receives from it.

    Attributes:
        dims: the plan of each dim that is cut, such as height and width.
        place: number of this rank's part in each of these dims.

    Raises:
        HaloError: if there is no such place.
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
        """Returns the plan from a cache: the same arguments give the same object."""
        return HaloPlan(dims, place)

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.place))

    def __hash__(self) -> int:  # plans are looked up at every step, and have many integers
        return self._hash

    @cached_property
    def grid_shape(self) -> tuple[int, ...]:
        return tuple(dim.parts for dim in self.dims)

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.grid_shape)

    @cached_property
    def rank(self) -> int:
        return self.rank_of(self.place)

    def rank_of(self, place: Iterable[int]) -> int:
        """Returns the rank at a place of the grid."""
        rank = 0
        for at, parts in zip(place, self.grid_shape, strict=True):
            rank = rank * parts + at
        return rank

    @cached_property
    def owned_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tile, in the planned dims."""
        return tuple(len(dim.owned[at]) for dim, at in zip(self.dims, self.place, strict=True))

    @cached_property
    def buffer_shape(self) -> tuple[int, ...]:
        """Shape of all that this rank needs, padding included, in the planned dims."""
        return tuple(len(dim.needed[at]) for dim, at in zip(self.dims, self.place, strict=True))

    @cached_property
    def receives(self) -> dict[int, tuple[BoxCopy, ...]]:
        """The boxes to receive, by peer, in the order of its message."""
        return {rank: boxes for rank, boxes in self._sources.items() if rank != self.rank}

    @cached_property
    def local(self) -> tuple[BoxCopy, ...]:
        """The boxes that this rank copies from its own tile."""
        return self._sources.get(self.rank, ())

    @cached_property
    def sends(self) -> dict[int, tuple[BoxCopy, ...]]:
        """The boxes to send, by peer, in the order of the message."""
        sends: dict[int, tuple[BoxCopy, ...]] = {}
        for peer in product(*(range(dim.parts) for dim in self.dims)):
            if peer == self.place:
                continue
            owned = [
                [segment for segment in dim.segments[there] if segment.owner == here]
                for dim, there, here in zip(self.dims, peer, self.place, strict=True)
            ]
            boxes = tuple(_box(segments) for segments in product(*owned))
            if boxes:
                sends[self.rank_of(peer)] = boxes
        return sends

    @cached_property
    def padding(self) -> tuple[Box, ...]:
        """The boxes of the buffer that are constant padding; they do not overlap."""
        whole = [Interval(0, length) for length in self.buffer_shape]
        inside = [dim.inside(at) for dim, at in zip(self.dims, self.place, strict=True)]
        boxes: list[Box] = []
        for at, (full, middle) in enumerate(zip(whole, inside, strict=True)):
            outer = [Interval(0, middle.start), Interval(middle.stop, full.stop)] if middle else [full]
            boxes += [(*inside[:at], side, *whole[at + 1 :]) for side in outer]
        return tuple(box for box in boxes if all(box))

    @cached_property
    def padding_slices(self) -> tuple[Index, ...]:
        """Index of each padding box in the buffer, with all of the leading dims."""
        return tuple((..., *(interval.as_slice() for interval in box)) for box in self.padding)

    @cached_property
    def anyone_exchanges(self) -> bool:
        """Whether any rank needs anything from another rank; the same on all ranks."""
        owners = [
            {(place, s.owner) for place, segments in enumerate(dim.segments) for s in segments if s.owner is not None}
            for dim in self.dims
        ]
        return all(owners) and any(place != owner for pairs in owners for place, owner in pairs)

    @cached_property
    def is_view(self) -> bool:
        """Whether the whole buffer is one box of this rank's tile, unchanged."""
        return not self.receives and not self.padding and len(self.local) == 1 and self.local[0].is_plain

    @cached_property
    def is_identity(self) -> bool:
        """Whether every rank needs exactly what it owns."""
        pairs = (pair for dim in self.dims for pair in zip(dim.owned, dim.needed, strict=True))
        return all(owned == needed or not (owned or needed) for owned, needed in pairs)

    @cached_property
    def _sources(self) -> dict[int, tuple[BoxCopy, ...]]:
        filled = [
            [segment for segment in dim.segments[at] if segment.owner is not None]
            for dim, at in zip(self.dims, self.place, strict=True)
        ]
        sources: dict[int, list[BoxCopy]] = {}
        for segments in product(*filled):
            owner = self.rank_of(segment.owner for segment in segments if segment.owner is not None)
            sources.setdefault(owner, []).append(_box(segments))
        return {rank: tuple(boxes) for rank, boxes in sources.items()}

    def __str__(self) -> str:
        lines = [f"halo plan of rank {self.rank} of {self.size}, at {self.place} of {self.grid_shape}"]
        for number, (dim, at) in enumerate(zip(self.dims, self.place, strict=True)):
            mode = "" if dim.padding_mode == "zeros" else f", padding {dim.padding_mode}"
            lines.append(f"  dim {number} of {dim.extent}: owns {dim.owned[at]}, needs {dim.needed[at]}{mode}")
        lines += [f"  own tile   {_arrow(box)}" for box in self.local]
        lines += [f"  to rank {peer}   {_text(box.source)}" for peer, boxes in self.sends.items() for box in boxes]
        lines += [f"  from rank {peer} {_arrow(box)}" for peer, boxes in self.receives.items() for box in boxes]
        lines += [f"  padding    {_text(box)}" for box in self.padding]
        return "\n".join(lines)


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
    steps = "" if box.is_plain else f"  (steps {box.steps})"
    return f"{_text(box.source)} -> buffer {_text(box.target)}{steps}"
