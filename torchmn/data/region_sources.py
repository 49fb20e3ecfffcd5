"""Cuts images of each kind of data set to one rank's tile, without keeping whole images in memory.

All classes can be pickled, for the worker processes of a `DataLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from torchmn.communicators.arguments import describe
from torchmn.datasets.arrays import ImageSet
from torchmn.errors import ArgumentError, HaloError
from torchmn.geometry import Interval, all_owned

Cut = tuple[int | str, ...]


class Tiles(Protocol):
    """Items whose images are cut to a tile."""

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Region:
    """One tile of a grid of tiles, for images of any size: `place` of `parts` along each of `axes`, the last dims."""

    axes: tuple[str, ...]
    parts: tuple[int, ...]
    place: tuple[int, ...]

    def intervals(self, shape: Sequence[int]) -> tuple[Interval, ...]:
        """Returns the interval of each cut dim for an image of `shape`; HaloError if a tile would be empty."""
        extents = tuple(shape)[-len(self.parts) :]
        if len(extents) < len(self.parts):
            raise HaloError(f"expected images of at least {len(self.parts)} dims, got shape {tuple(shape)}")
        for axis, extent, parts in zip(self.axes, extents, self.parts, strict=True):
            if extent < parts:
                raise HaloError(
                    f"images of shape {tuple(shape)} have {extent} along '{axis}', too few for {parts} ranks: some "
                    f"tiles would be empty. Use at most {extent} ranks along '{axis}'"
                )
        each = zip(extents, self.parts, self.place, strict=True)
        return tuple(all_owned(extent, parts)[at] for extent, parts, at in each)

    def index(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """Returns a slice for every dim of an image, or of images, of `shape`: the tile."""
        cut = tuple(interval.as_slice() for interval in self.intervals(shape))
        return (*[slice(None)] * (len(shape) - len(cut)), *cut)


class ColumnSource:
    """A data set that is a table: item i is `build` of row i of all columns. The `cut` columns are images."""

    def __init__(self, columns: Sequence[Any], cut: Sequence[int], build: Callable[[list[Any]], Any]):
        self.columns, self.cut, self.build = list(columns), tuple(cut), build

    def __len__(self) -> int:
        return min(column.shape[0] for column in self.columns)

    def image_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the images of an item."""
        return tuple(tuple(self.columns[number].shape[1:]) for number in self.cut)

    def tiles(self, region: Region, rows: Tensor | None) -> Tiles:
        """Returns the tiles of `rows` (None: all): copies, if the data set is in memory, which can then be freed."""
        taken = [_take(x, region if i in self.cut else None, rows) for i, x in enumerate(self.columns)]
        return ZippedColumns(tuple(taken), self.build)

    def probes(self) -> dict[str, Any]:
        """Returns what ranks compare: one line of each image, so that little is read from files; in memory, all."""
        lines = [_MiddleLine(x) if i in self.cut else x for i, x in enumerate(self.columns)]
        probes: dict[str, Any] = {" (a line of it)": ZippedColumns(tuple(lines), list)}
        if all(_is_in_memory(x) for x in self.columns):
            probes[""] = ZippedColumns(tuple(self.columns), self.build)
        return probes

    def column_views(self, region: Region) -> list[Any]:
        """Returns the columns with images cut: views of data in memory, readers of data in files."""
        views = []
        for number, x in enumerate(self.columns):
            index = region.index(x.shape[1:]) if number in self.cut else (slice(None),) * (len(x.shape) - 1)
            views.append(x[(slice(None), *index)] if _is_in_memory(x) else _FileRows(x, index, None))
        return views


@dataclass(frozen=True)
class ZippedColumns:
    """A data set whose item i is `build` of row i of all columns."""

    columns: tuple[Any, ...]
    build: Callable[[list[Any]], Any]

    def __getitem__(self, index: int) -> Any:
        return self.build([column[index] for column in self.columns])


@dataclass(frozen=True)
class _MiddleLine:
    """A data set of one line of each image: along the last dim, in the middle."""

    images: Any

    def __getitem__(self, index: int) -> Any:
        extents = tuple(self.images.shape)[1:]
        return self.images[(index, *(extent // 2 for extent in extents[:-1]), *[slice(0, extents[-1])] * bool(extents))]


class ItemSource:
    """Any other map-style data set: items are read whole, one at a time, and cut immediately."""

    def __init__(self, dataset: Any, cut: Cut):
        self.dataset, self.cut = dataset, cut

    def __len__(self) -> int:
        return len(self.dataset)

    def image_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the images of the first item."""
        item = self.dataset[0]
        images = [_of(item, key) for key in self.cut] if isinstance(item, list | tuple | dict) else [item]
        return tuple(tuple(_checked(image).shape) for image in images)

    def tiles(self, region: Region, rows: Tensor | None) -> Tiles:
        """Returns the tiles of `rows` (None: all)."""
        return _ItemTiles(self.dataset, self.cut, region, rows)

    def probes(self) -> dict[str, Any]:
        """Returns what ranks compare: whole items."""
        return {"": self.dataset}


@dataclass(frozen=True)
class _ItemTiles:
    dataset: Any
    cut: Cut
    region: Region
    rows: Tensor | None

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index if self.rows is None else int(self.rows[index])]
        if isinstance(item, dict):
            return {**item, **{key: self._tile(_of(item, key)) for key in self.cut}}
        if not isinstance(item, list | tuple):
            return self._tile(item)
        cut = {key + len(item) if isinstance(key, int) and key < 0 else key for key in self.cut}
        values = [self._tile(value) if i in cut else value for i, value in enumerate(item)]
        if hasattr(item, "_fields"):  # a named tuple
            return type(item)(*values)
        return values if isinstance(item, list) else tuple(values)

    def _tile(self, image: Any) -> Any:
        tile = _checked(image)[self.region.index(image.shape)]
        return tile.clone() if isinstance(tile, Tensor) else tile.copy()  # so that the whole image can be freed


def source_of(dataset: Any, cut: Cut) -> ColumnSource | ItemSource:
    """Returns the source of the tiles of `dataset`; raises an ArgumentError if it cannot be cut."""
    if isinstance(dataset, IterableDataset):
        raise ArgumentError(
            f"expected a map-style data set, or a pair (images, labels), got {type(dataset).__name__}, an iterable "
            "one: its tiles cannot be read alone. Let one rank read whole images and send each batch: "
            "torchmn.iterators.create_multi_node_iterator"
        )
    if not hasattr(dataset, "__getitem__"):
        raise ArgumentError(f"expected a map-style data set, or a pair (images, labels), got {describe(dataset)}")
    if type(dataset) is ImageSet:
        return ColumnSource([dataset.images, dataset.labels], _cut_columns(cut, 2), _image_and_label)
    if type(dataset) is TensorDataset:
        return ColumnSource(dataset.tensors, _cut_columns(cut, len(dataset.tensors)), tuple)
    if _is_array(dataset):
        return ColumnSource([dataset], (0,), _only_value)
    if isinstance(dataset, tuple) and dataset and all(_is_array(column) for column in dataset):
        lengths = [column.shape[0] for column in dataset]
        if len(set(lengths)) > 1:
            raise ArgumentError(f"expected images and labels of the same length, got {lengths}")
        return ColumnSource(dataset, _cut_columns(cut, len(dataset)), tuple)
    if isinstance(dataset, list) and all(_is_array(x) for x in dataset) and len({len(x.shape) for x in dataset}) > 1:
        raise ArgumentError("expected a tuple (images, labels), or a list of images, got a list of both")
    return ItemSource(dataset, cut)


def _image_and_label(row: list[Any]) -> tuple[Any, int]:
    return row[0], int(row[1])


def _only_value(row: list[Any]) -> Any:
    return row[0]


def _is_array(x: Any) -> bool:
    """Returns whether `x` has rows and can be sliced: a tensor, an array, or an array-like in a file.

    An array of zarr 3 has no `len`: the number of rows is `shape[0]`.
    """
    return hasattr(x, "shape") and hasattr(x, "dtype") and hasattr(x, "__getitem__") and len(x.shape) > 0


def _cut_columns(cut: Cut, columns: int) -> tuple[int, ...]:
    if not all(isinstance(number, int) and -columns <= number < columns for number in cut):
        raise ArgumentError(f"expected cut to name elements 0..{columns - 1} of an item, got {cut}")
    return tuple(int(number) % columns for number in cut)


def _take(x: Any, region: Region | None, rows: Tensor | None) -> Tiles:
    """Returns the rows of a column, cut to `region`: a copy of data in memory, a reader of data in a file."""
    index = (slice(None), *(region.index(x.shape[1:]) if region else (slice(None),) * (len(x.shape) - 1)))
    # Slice first, then take rows, so that only the tile is read.
    if isinstance(x, Tensor):
        tiles = x.detach()[index]
        return tiles.clone(memory_format=torch.contiguous_format) if rows is None else tiles[rows]
    if _is_in_memory(x):
        return x[index].copy() if rows is None else x[index][rows.numpy()]
    return _FileRows(x, index[1:], rows)


@dataclass(frozen=True)
class _FileRows:
    array: Any
    index: tuple[slice, ...]
    rows: Tensor | None

    def __len__(self) -> int:
        return self.array.shape[0] if self.rows is None else len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.array[(index if self.rows is None else int(self.rows[index]), *self.index)]
        return np.array(row) if isinstance(row, np.ndarray) else row


def _is_in_memory(x: Any) -> bool:
    return isinstance(x, Tensor) or (type(x) is np.ndarray and not _is_mapped(x))


def _is_mapped(x: np.ndarray) -> bool:
    """Returns whether an array is a view of a memory-mapped file."""
    base: Any = x
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False


def _of(item: Any, key: int | str) -> Any:
    try:
        return item[key]
    except (KeyError, IndexError, TypeError):
        found = f"a dict of {', '.join(map(repr, item))}" if isinstance(item, dict) else describe(item)
        raise ArgumentError(
            f"expected items with an element {key!r} to cut, got {found}. Name the elements that are images with cut="
        ) from None


def _checked(image: Any) -> Any:
    if not isinstance(image, Tensor | np.ndarray):
        raise ArgumentError(
            f"expected images that are tensors or arrays, got {describe(image)}. Name the elements of an item that "
            "are images with cut=; convert images of other types to tensors in the data set's transform"
        )
    return image
