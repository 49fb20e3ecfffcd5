"""How a global tensor is cut over the ranks of a process grid. Integers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from torchmn.context import here
from torchmn.geometry import Interval, owned

if TYPE_CHECKING:
    from torchmn.communicators.process_grid import ProcessGrid

# The grid axis along which the last, the last but one, ... dim of an image is cut.
IMAGE_AXES = ("width", "height", "depth")


@dataclass(frozen=True)
class Cut:
    """One dim, cut into one interval of indices per place along a grid axis ("vector": per rank of `grid.tiles`)."""

    axis: str
    intervals: tuple[Interval, ...]

    @staticmethod
    def balanced(axis: str, extent: int, parts: int) -> Cut:
        return Cut(axis, tuple(owned(extent, parts, place) for place in range(parts)))

    @property
    def extent(self) -> int:
        return self.intervals[-1].stop


@dataclass(frozen=True)
class FlatCut:
    """A dim that is a flattened (channel, *image) tensor whose image is cut: each rank has its own tile's columns."""

    shape: tuple[int, ...]
    cuts: tuple[Cut | None, ...]

    @property
    def extent(self) -> int:
        return prod(self.shape)


AnyCut = Cut | FlatCut | None


@dataclass(frozen=True)
class Samples:
    """Which samples of the whole batch a rank holds: those from `start` on, of `total`.

    known: whether that is so; in evaluation ranks do not ask others along data how many they have
    """

    start: int
    total: int
    known: bool = True


@contextmanager
def forward_of(samples: Samples) -> Iterator[None]:
    """While a parallel model's forward runs, say which samples of the whole batch it computes."""
    before, here.samples = here.samples, samples
    try:
        yield
    finally:
        here.samples = before


def samples_now(batch: int) -> Samples:
    """The samples that the running forward computes; outside of one, a batch is all there is."""
    return here.samples or Samples(0, batch)


@dataclass(frozen=True)
class Sharding:
    """The shape of a global tensor and how each of its dims is cut. The batch dim is this data replica's own.

    Attributes:
        learned: what a pass has learned of the model that computes with the tensor, by the id of a parameter.
    """

    grid: ProcessGrid
    shape: tuple[int, ...]
    cuts: tuple[AnyCut, ...]
    samples: Samples
    learned: Mapping[int, Any] = field(default_factory=dict, compare=False, repr=False)

    def dim(self, dim: int, *, new: bool = False) -> int:
        """Returns a dim counted from the first; with `new`, of a tensor with one dim more.

        Raises:
            IndexError: as torch does, if there is no such dim.
        """
        count = len(self.shape) + new
        if not -count <= dim < count:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], but got {dim})"
            )
        return dim % count

    def interval(self, dim: int, tile: int | None = None) -> Interval:
        """The indices of a dim that a rank of `grid.tiles` (this one by default) owns."""
        cut = self.cuts[dim]
        if cut is None:
            return Interval(0, self.shape[dim])
        assert isinstance(cut, Cut), "a flattened image's columns are not one interval"
        return cut.intervals[self.place(cut.axis, tile)]

    def place(self, axis: str, tile: int | None = None) -> int:
        """Where along a grid axis a rank of `grid.tiles` is."""
        tile = self.grid.tiles.rank if tile is None else tile
        if axis == "vector":
            return tile
        for name in IMAGE_AXES:  # tiles are numbered row-major: width turns fastest
            tile, place = divmod(tile, self.grid.sizes[name])
            if name == axis:
                return place
        raise KeyError(axis)

    def local_shape(self, tile: int | None = None) -> tuple[int, ...]:
        """The shape of a rank's part, this one's by default."""
        key = (Sharding.local_shape, tile)
        known = self.worked_out.get(key)
        if known is None:
            known = tuple(self._local_extent(dim, tile) for dim in range(len(self.shape)))
            self.worked_out[key] = known
        return known

    def _local_extent(self, dim: int, tile: int | None) -> int:
        cut = self.cuts[dim]
        if isinstance(cut, FlatCut):
            return prod(self.unflattened(dim).local_shape(tile)[1:])
        return len(self.interval(dim, tile))

    def unflattened(self, dim: int) -> Sharding:
        """The (batch, channel, *image) layout of which dim `dim` is the flattened rest."""
        cut = self.cuts[dim]
        assert isinstance(cut, FlatCut)
        return self.with_dims((self.shape[0], *cut.shape), (None, *cut.cuts))

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims that are cut."""
        return tuple(dim for dim, cut in enumerate(self.cuts) if cut is not None)

    @cached_property
    def flat_dim(self) -> int | None:
        """The dim that is a flattened image in tiles; reshaping makes no second one."""
        return next((dim for dim in self.cut_dims if isinstance(self.cuts[dim], FlatCut)), None)

    @cached_property
    def boxes(self) -> tuple[tuple[slice, ...], ...]:
        """What each rank of `grid.tiles` owns, as slices of the global tensor: all of a flattened image's dim."""
        return tuple(
            tuple(
                self.interval(dim, tile).as_slice() if isinstance(cut, Cut) else slice(None)
                for dim, cut in enumerate(self.cuts)
            )
            for tile in range(self.grid.tiles.size)
        )

    @cached_property
    def worked_out(self) -> dict[Any, Any]:
        """What rules have worked out for this layout: a model comes with the same ones at every step."""
        return {}

    @cached_property
    def is_tile(self) -> bool:
        """Whether an image is cut, flattened or not; else a vector is (or nothing)."""
        cuts = [part for cut in self.cuts for part in (cut.cuts if isinstance(cut, FlatCut) else (cut,))]
        return any(cut is not None and cut.axis != "vector" for cut in cuts)

    def with_dims(self, shape: tuple[int, ...], cuts: tuple[AnyCut, ...]) -> Sharding:
        return replace(self, shape=tuple(shape), cuts=tuple(cuts))

    def __str__(self) -> str:
        words = []
        for extent, cut in zip(self.shape, self.cuts, strict=True):
            if cut is None:
                words.append(str(extent))
            elif isinstance(cut, FlatCut):
                words.append(f"{extent} (flattened tile)")
            else:
                words.append(f"{extent} over {cut.axis}")
        return f"({', '.join(words)})"


def image_layout(
    grid: ProcessGrid, shape: tuple[int, ...], samples: Samples, learned: Mapping[int, Any] | None = None
) -> Sharding:
    """The layout of (batch, channel, *image): each image dim balanced over its axis of the grid."""
    cuts: list[AnyCut] = [None] * len(shape)
    for dim, axis in enumerate(grid.axes_of(len(shape) - 2), start=2):
        if grid.sizes[axis] > 1:
            cuts[dim] = Cut.balanced(axis, shape[dim], grid.sizes[axis])
    return Sharding(grid, tuple(shape), tuple(cuts), samples, {} if learned is None else learned)
