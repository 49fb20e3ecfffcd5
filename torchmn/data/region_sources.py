"""How each kind of data set is cut: items whose images are this rank's tile, and nothing else of them in memory.

Everything here can be pickled, for the worker processes of a `DataLoader`.
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
    """Items whose images are cut."""

    def __getitem__(self, place: int, /) -> Any: ...


@dataclass(frozen=True)
class Region:
    """A place in a grid of tiles: cuts the last dims of any image, whatever its size."""

    axes: tuple[str, ...]
    parts: tuple[int, ...]
    place: tuple[int, ...]

    def intervals(self, shape: Sequence[int]) -> tuple[Interval, ...]:
        """What this place owns of an image of `shape`; HaloError if a place would own nothing."""
        extents = tuple(shape)[-len(self.parts) :]
        if len(extents) < len(self.parts):
            raise HaloError(f"expected images of at least {len(self.parts)} dims, got shape {tuple(shape)}")
        for axis, extent, parts in zip(self.axes, extents, self.parts, strict=True):
            if extent < parts:
                raise HaloError(
                    f"images of shape {tuple(shape)} have {extent} along '{axis}', too few for {parts} ranks: some "
                    f"would own nothing. Use at most {extent} ranks along '{axis}'"
                )
        each = zip(extents, self.parts, self.place, strict=True)
        return tuple(all_owned(extent, parts)[at] for extent, parts, at in each)

    def index(self, shape: Sequence[int]) -> tuple[slice, ...]:
        """How to index an image, or images, of `shape` for the tile: every dim has its slice."""
        mine = tuple(interval.as_slice() for interval in self.intervals(shape))
        return (*[slice(None)] * (len(shape) - len(mine)), *mine)


class Columns:
    """A data set that is a table: item i is row i of each column. `cut` columns are images."""

    def __init__(self, columns: Sequence[Any], cut: Sequence[int], build: Callable[[list[Any]], Any]):
        self.columns, self.cut, self.build = list(columns), tuple(cut), build

    def __len__(self) -> int:
        return min(len(column) for column in self.columns)

    def image_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what is cut of an item."""
        return tuple(tuple(self.columns[place].shape[1:]) for place in self.cut)

    def tiles(self, region: Region, rows: Tensor | None) -> Tiles:
        """The items of `rows` (None: all), cut. What lay in memory can then be freed."""
        taken = [_taken(x, region if i in self.cut else None, rows) for i, x in enumerate(self.columns)]
        return Row(tuple(taken), self.build)

    def probes(self) -> dict[str, Any]:
        """What ranks compare of an item: a line of each image, so that of files only lines are read; all in memory."""
        lines = [_Line(x) if i in self.cut else x for i, x in enumerate(self.columns)]
        probes: dict[str, Any] = {" (a line of it)": Row(tuple(lines), list)}
        if all(_lies_in_memory(x) for x in self.columns):
            probes[""] = Row(tuple(self.columns), self.build)
        return probes

    def column_views(self, region: Region) -> list[Any]:
        """The columns, those with images cut: views of what lies in memory, and what reads a file row by row."""
        views = []
        for place, x in enumerate(self.columns):
            index = region.index(x.shape[1:]) if place in self.cut else (slice(None),) * (len(x.shape) - 1)
            views.append(x[(slice(None), *index)] if _lies_in_memory(x) else _InFile(x, index, None))
        return views


@dataclass(frozen=True)
class Row:
    """Item i is made of row i of each column."""

    columns: tuple[Any, ...]
    build: Callable[[list[Any]], Any]

    def __getitem__(self, place: int) -> Any:
        return self.build([column[place] for column in self.columns])


@dataclass(frozen=True)
class _Line:
    """The line along the last dim in the middle of each image."""

    images: Any

    def __getitem__(self, place: int) -> Any:
        extents = tuple(self.images.shape)[1:]
        return self.images[(place, *(extent // 2 for extent in extents[:-1]), *[slice(0, extents[-1])] * bool(extents))]


class Items:
    """Any other map-style data set: an item is read whole when it is asked for, and cut at once."""

    def __init__(self, dataset: Any, cut: Cut):
        self.dataset, self.cut = dataset, cut

    def __len__(self) -> int:
        return len(self.dataset)

    def image_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what is cut of the first item."""
        item = self.dataset[0]
        images = [_of(item, key) for key in self.cut] if isinstance(item, list | tuple | dict) else [item]
        return tuple(tuple(_checked(image).shape) for image in images)

    def tiles(self, region: Region, rows: Tensor | None) -> Tiles:
        """The items of `rows` (None: all), cut."""
        return _Item(self.dataset, self.cut, region, rows)

    def probes(self) -> dict[str, Any]:
        """What ranks compare of an item."""
        return {"": self.dataset}


@dataclass(frozen=True)
class _Item:
    dataset: Any
    cut: Cut
    region: Region
    rows: Tensor | None

    def __len__(self) -> int:
        return len(self.dataset) if self.rows is None else len(self.rows)

    def __getitem__(self, place: int) -> Any:
        item = self.dataset[place if self.rows is None else int(self.rows[place])]
        if isinstance(item, dict):
            return {**item, **{key: self._tile(_of(item, key)) for key in self.cut}}
        if not isinstance(item, list | tuple):
            return self._tile(item)
        places = {key + len(item) if isinstance(key, int) and key < 0 else key for key in self.cut}
        values = [self._tile(value) if i in places else value for i, value in enumerate(item)]
        if hasattr(item, "_fields"):  # a named tuple
            return type(item)(*values)
        return values if isinstance(item, list) else tuple(values)

    def _tile(self, image: Any) -> Any:
        tile = _checked(image)[self.region.index(image.shape)]
        return tile.clone() if isinstance(tile, Tensor) else tile.copy()  # so that the whole image can be freed


def source_of(dataset: Any, cut: Cut) -> Columns | Items:
    """How to cut `dataset`; ArgumentError if it can not be."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ArgumentError(f"expected a map-style data set, or a pair (images, labels), got {describe(dataset)}")
    if type(dataset) is ImageSet:
        return Columns([dataset.images, dataset.labels], _places(cut, 2), _image_and_label)
    if type(dataset) is TensorDataset:
        return Columns(dataset.tensors, _places(cut, len(dataset.tensors)), tuple)
    if _is_array(dataset):
        return Columns([dataset], (0,), _alone)
    if isinstance(dataset, tuple) and dataset and all(_is_array(column) for column in dataset):
        lengths = [len(column) for column in dataset]
        if len(set(lengths)) > 1:
            raise ArgumentError(f"expected images and labels of one length, got {lengths}")
        return Columns(dataset, _places(cut, len(dataset)), tuple)
    if isinstance(dataset, list) and all(_is_array(x) for x in dataset) and len({len(x.shape) for x in dataset}) > 1:
        raise ArgumentError("expected a tuple (images, labels), or a list of images, got a list of both")
    return Items(dataset, cut)


def _image_and_label(row: list[Any]) -> tuple[Any, int]:
    return row[0], int(row[1])


def _alone(row: list[Any]) -> Any:
    return row[0]


def _is_array(x: Any) -> bool:
    """Whether `x` has rows and can be sliced: a tensor, an array, or a file's data set that looks like one."""
    return hasattr(x, "shape") and hasattr(x, "dtype") and hasattr(x, "__getitem__") and len(x.shape) > 0


def _places(cut: Cut, columns: int) -> tuple[int, ...]:
    if not all(isinstance(place, int) and -columns <= place < columns for place in cut):
        raise ArgumentError(f"expected cut to name places 0..{columns - 1} of an item, got {cut}")
    return tuple(int(place) % columns for place in cut)


def _taken(x: Any, region: Region | None, rows: Tensor | None) -> Tiles:
    """The rows of a column, cut: a copy of the tiles of what lies in memory; a file's are read when asked for."""
    index = (slice(None), *(region.index(x.shape[1:]) if region else (slice(None),) * (len(x.shape) - 1)))
    # Slice first, then take rows: so no more than the tile is ever read.
    if isinstance(x, Tensor):
        tiles = x.detach()[index]
        return tiles.clone(memory_format=torch.contiguous_format) if rows is None else tiles[rows]
    if _lies_in_memory(x):
        return x[index].copy() if rows is None else x[index][rows.numpy()]
    return _InFile(x, index[1:], rows)


@dataclass(frozen=True)
class _InFile:
    array: Any
    index: tuple[slice, ...]
    rows: Tensor | None

    def __len__(self) -> int:
        return len(self.array) if self.rows is None else len(self.rows)

    def __getitem__(self, place: int) -> Any:
        row = self.array[(place if self.rows is None else int(self.rows[place]), *self.index)]
        return np.array(row) if isinstance(row, np.ndarray) else row


def _lies_in_memory(x: Any) -> bool:
    return isinstance(x, Tensor) or (type(x) is np.ndarray and not _is_mapped(x))


def _is_mapped(x: np.ndarray) -> bool:
    """Whether an array is a view of a memory-mapped file."""
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
        has = f"a dict of {', '.join(map(repr, item))}" if isinstance(item, dict) else describe(item)
        raise ArgumentError(
            f"expected items with an element {key!r} to cut, got {has}. Name the elements that are images with cut="
        ) from None


def _checked(image: Any) -> Any:
    if not isinstance(image, Tensor | np.ndarray):
        raise ArgumentError(
            f"expected images that are tensors or arrays, got {describe(image)}. Name those elements of an item that "
            "are with cut=; a picture of another kind must be made one by the data set's transform"
        )
    return image
