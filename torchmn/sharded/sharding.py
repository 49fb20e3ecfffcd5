"""Sharding: the shape of a global tensor, and how its dims are cut over the ranks of a process grid. Integers only."""

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

# The grid axes along which the last, second last and third last dim of an image are cut.
IMAGE_AXES = ("width", "height", "depth")


@dataclass(frozen=True)
class Cut:
    """One dim that is cut into intervals of indices.

    Attributes:
        axis: "depth", "height" or "width": the axis of the grid along which the ranks are counted; or "vector": all
            ranks of `grid.tiles`, one interval each.
        intervals: which indices of the global tensor each place along the axis holds.
    """

    axis: str
    intervals: tuple[Interval, ...]

    @staticmethod
    def balanced(axis: str, extent: int, parts: int) -> Cut:
        """Returns the cut of `extent` indices into intervals that differ by at most one, the longer ones first."""
        return Cut(axis, tuple(owned(extent, parts, place) for place in range(parts)))

    @property
    def extent(self) -> int:
        """The extent of the global dim."""
        return self.intervals[-1].stop


@dataclass(frozen=True)
class FlatCut:
    """A dim that holds a flattened (channel, *image) tensor; each rank has the columns of its tile.

    Attributes:
        shape: (channel, *image), global.
        cuts: of these dims.
    """

    shape: tuple[int, ...]
    cuts: tuple[Cut | None, ...]

    @property
    def extent(self) -> int:
        """The extent of the global dim."""
        return prod(self.shape)


AnyCut = Cut | FlatCut | None


@dataclass(frozen=True)
class Samples:
    """The samples of the global batch that a rank computes.

    Rules need them where a result depends on the whole batch: a dropout mask is drawn for all samples and then cut.

    Attributes:
        start: the first of them.
        total: the size of the global batch.
        known: False in evaluation on a grid with several ranks along `data`, which do not compare their batch sizes;
            `start` and `total` are then this rank's own.
    """

    start: int
    total: int
    known: bool = True


@contextmanager
def computing_samples(samples: Samples) -> Iterator[None]:
    """Context of a parallel model's forward, in which `current_samples` returns `samples`."""
    before, here.samples = here.samples, samples
    try:
        yield
    finally:
        here.samples = before


def current_samples(batch: int) -> Samples:
    """Returns the samples that the running forward computes; outside of a forward, a global batch of that size."""
    return here.samples or Samples(0, batch)


@dataclass(frozen=True)
class Sharding:
    """The shape of a global tensor and the cut of each of its dims.

    Attributes:
        grid: the ranks. A tensor is cut over `grid.tiles`; ranks along `data` have different samples.
        shape: of the global tensor. Its batch dim counts the samples of this rank's replica only.
        cuts: of each dim, None where the dim is whole on every rank.
        samples: which samples of the global batch these are.
        learned: the results of the dry runs that an optional pass (fusion) needs in rules: the id of a parameter ->
            how wide a halo to fetch before the convolution with that weight. Shared by all tensors of a model.
    """

    grid: ProcessGrid
    shape: tuple[int, ...]
    cuts: tuple[AnyCut, ...]
    samples: Samples
    learned: Mapping[int, Any] = field(default_factory=dict, compare=False, repr=False)

    def dim(self, dim: int, *, new: bool = False) -> int:
        """Returns a dim counted from the first; with `new`, the index of a dim to be inserted.

        Args:
            dim: as torch's functions take it; negative ones count from the end.
            new: whether the dim is to be inserted, so that one more position exists.

        Returns:
            A dim from 0 on.

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
        """Returns the global indices of a dim that a rank of `grid.tiles` owns; this rank by default."""
        cut = self.cuts[dim]
        if cut is None:
            return Interval(0, self.shape[dim])
        assert isinstance(cut, Cut), "a flattened image's columns are not one interval"
        return cut.intervals[self.place(cut.axis, tile)]

    def place(self, axis: str, tile: int | None = None) -> int:
        """Returns the place of a rank of `grid.tiles` along a grid axis; this rank by default."""
        tile = self.grid.tiles.rank if tile is None else tile
        if axis == "vector":
            return tile
        for name in IMAGE_AXES:  # tiles are numbered in row-major order: the place along width changes fastest
            tile, place = divmod(tile, self.grid.sizes[name])
            if name == axis:
                return place
        raise KeyError(axis)

    def local_shape(self, tile: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a rank's shard; this rank's by default."""
        key = (Sharding.local_shape, tile)
        known = self.cache.get(key)
        if known is None:
            known = tuple(self._local_extent(dim, tile) for dim in range(len(self.shape)))
            self.cache[key] = known
        return known

    def _local_extent(self, dim: int, tile: int | None) -> int:
        cut = self.cuts[dim]
        if isinstance(cut, FlatCut):
            return prod(self.unflattened(dim).local_shape(tile)[1:])
        return len(self.interval(dim, tile))

    def unflattened(self, dim: int) -> Sharding:
        """Returns the sharding of the (batch, channel, *image) tensor whose flattened image dim `dim` holds."""
        cut = self.cuts[dim]
        assert isinstance(cut, FlatCut)
        return self.with_dims((self.shape[0], *cut.shape), (None, *cut.cuts))

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims that are cut."""
        return tuple(dim for dim, cut in enumerate(self.cuts) if cut is not None)

    @cached_property
    def flat_dim(self) -> int | None:
        """The dim with a `FlatCut`, if any; reshaping never makes a second one."""
        return next((dim for dim in self.cut_dims if isinstance(self.cuts[dim], FlatCut)), None)

    @cached_property
    def boxes(self) -> tuple[tuple[slice, ...], ...]:
        """The slices of the global tensor that each rank of `grid.tiles` owns; a dim with a `FlatCut` is not sliced."""
        return tuple(
            tuple(
                self.interval(dim, tile).as_slice() if isinstance(cut, Cut) else slice(None)
                for dim, cut in enumerate(self.cuts)
            )
            for tile in range(self.grid.tiles.size)
        )

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """Plans that rules computed for this sharding; a model uses the same `Sharding` objects in every step."""
        return {}

    @cached_property
    def is_tile(self) -> bool:
        """Whether an image is cut, flattened or not. If not, a vector may be cut over the ranks of `grid.tiles`."""
        cuts = [part for cut in self.cuts for part in (cut.cuts if isinstance(cut, FlatCut) else (cut,))]
        return any(cut is not None and cut.axis != "vector" for cut in cuts)

    def with_dims(self, shape: tuple[int, ...], cuts: tuple[AnyCut, ...]) -> Sharding:
        """Returns the same sharding with other dims: the same object, with its cached plans, if these are equal."""
        shape, cuts = tuple(shape), tuple(cuts)
        return self if (shape, cuts) == (self.shape, self.cuts) else replace(self, shape=shape, cuts=cuts)

    def __str__(self) -> str:
        dims = []
        for extent, cut in zip(self.shape, self.cuts, strict=True):
            if cut is None:
                dims.append(str(extent))
            elif isinstance(cut, FlatCut):
                dims.append(f"{extent} (flattened tile)")
            else:
                dims.append(f"{extent} over {cut.axis}")
        return f"({', '.join(dims)})"


def image_layout(
    grid: ProcessGrid, shape: tuple[int, ...], samples: Samples, learned: Mapping[int, Any] | None = None
) -> Sharding:
    """Returns the sharding of (batch, channel, *image) whose image dims are cut evenly along the axes of the grid."""
    cuts: list[AnyCut] = [None] * len(shape)
    for dim, axis in enumerate(grid.axes_of(len(shape) - 2), start=2):
        if grid.sizes[axis] > 1:
            cuts[dim] = Cut.balanced(axis, shape[dim], grid.sizes[axis])
    return Sharding(grid, tuple(shape), tuple(cuts), samples, {} if learned is None else learned)
