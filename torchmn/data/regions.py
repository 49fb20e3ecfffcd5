"""Each rank's tile of every image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchmn.communicators.base import Communicator
from torchmn.communicators.process_grid import ProcessGrid, checked_grid
from torchmn.data.meeting import meet
from torchmn.data.partition import drawn_seed, permutation
from torchmn.data.region_sources import Region, source_of
from torchmn.data.selection import selection
from torchmn.errors import ArgumentError, HaloError
from torchmn.geometry import Interval, owned


def scatter_regions(
    dataset: Any,
    grid: ProcessGrid | Communicator,
    batch_size: int | None = None,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    drop_last: bool = False,
    cut: int | str | Sequence[int | str] = (0,),
    dims: int | None = None,
) -> RegionDataset:
    """This rank's tile of every image, labels whole, as a map-style data set; every rank of the grid calls it.

    dataset: the same on every rank: map-style, with items (image, label, ...); or (images, labels), arrays or
        tensors, one row per item; `torchmn.datasets.mnist()`, `cifar10(...)`. What lies in memory is copied, the tile
        only, so that the whole can be freed. Of memory-mapped arrays, and of arrays in files that can be sliced, only
        the tile is ever read. Items of other data sets are read when they are asked for, and cut at once.
    batch_size: of the whole grid, for a grid with a `data` axis: keep only this rank's micro-batches, in order. Then
        `DataLoader(tiles, batch_size=tiles.batch_size)` gives, as batch b of all ranks along `data` together, the
        serial run's batch b: replica d has its d-th part, balanced, larger parts first. Without it every replica has
        all items, and `MicroBatches` deals out the batches of any sampler, shuffled anew in each epoch too.
    shuffle, seed: take the items in the order of `seed`, which does not depend on the grid
    drop_last: leave out the items of a last batch that is not full (with `batch_size`)
    cut: the elements of an item that are images: (0, 1) for pairs of image and mask, keys for dicts
    dims: how many last dims are the image's: 2, or 3 on a grid with depth

    Data sets that differ between ranks, images with fewer rows than ranks, and wrong arguments raise on every rank.
    """
    grid = checked_grid(grid, "scatter_regions")
    region, source, total, shapes, problem, kind = None, None, 0, (), None, ArgumentError
    places: tuple[int | str, ...] = ()
    try:
        places = _places(cut)
        dims = _dims(dims, grid)
        region = Region(grid.axes_of(dims), grid.parts_of(dims), grid.place_of(dims))
        source = source_of(dataset, places)
        total = len(source)
        shapes = source.image_shapes() if total else ()
        for shape in shapes:
            region.intervals(shape)
        problem = _order_problem(batch_size, seed, total, grid.sizes["data"], drop_last)
    except (ArgumentError, HaloError) as error:
        problem, kind = str(error), type(error)
    except Exception as error:  # a user's data set may raise anything
        problem = f"the data set raised {type(error).__name__}: {error}"
    agreed = {"items": total, "images": shapes, "batch_size": batch_size, "shuffle": bool(shuffle), "seed": seed}
    agreed |= {"drop_last": bool(drop_last), "cut": places, "dims": dims}
    agreed |= {
        "chosen items (of a Subset; give random_split the same generator)": None if problem else selection(dataset)
    }
    try:
        meet(grid.comm, "scatter_regions", problem, {} if problem else agreed)
    except ArgumentError as error:
        raise kind(str(error)) from None
    assert region is not None and source is not None
    if shuffle and seed is None:
        seed = grid.comm.bcast_obj(drawn_seed() if grid.comm.rank == 0 else None)
    order = permutation(total, seed if shuffle else None)
    rows = order
    if batch_size is not None:
        rows = micro_batches(order, batch_size, grid.sizes["data"], grid.place["data"], drop_last)
    everything = batch_size is None and not shuffle
    item = source.tiles(region, None if everything else rows)
    micro = None if batch_size is None else len(owned(batch_size, grid.sizes["data"], grid.place["data"]))
    return RegionDataset(item, rows, total, shapes[0] if shapes else (), region, micro)


def micro_batches(order: Tensor, batch_size: int, replicas: int, replica: int, drop_last: bool) -> Tensor:
    """The items of one replica, micro-batch after micro-batch: its part of each batch of `batch_size` of `order`."""
    batches = [batch for batch in order.split(batch_size) if len(batch) == batch_size or not drop_last]
    mine = [batch[owned(len(batch), replicas, replica).as_slice()] for batch in batches]
    return torch.cat(mine) if mine else order[:0]


class RegionDataset(Dataset[Any]):
    """One rank's tiles of a data set of images. Made by `scatter_regions`.

    indices: (len(self),) int64, each item's place in the whole data set
    global_length: number of items in the whole data set
    image_shape: of a whole image, channels included
    region: what of the image's last dims this rank holds
    batch_size: this rank's part of a batch, if `scatter_regions` was told the size of the whole batch
    """

    def __init__(
        self,
        item: Callable[[int], Any],
        indices: Tensor,
        global_length: int,
        image_shape: tuple[int, ...],
        region: Region,
        batch_size: int | None,
    ):
        self._item = item
        self.indices = indices
        self.global_length = global_length
        self.image_shape = image_shape
        self.region: tuple[Interval, ...] = region.intervals(image_shape) if image_shape else ()
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int | slice) -> Any:
        """One item, or a list of those of a slice."""
        place = range(len(self))[index]  # negative ones too, and an IndexError beyond the end
        return [self._item(each) for each in place] if isinstance(place, range) else self._item(place)

    def __repr__(self) -> str:
        rows = ", ".join(map(str, self.region))
        whole = "x".join(map(str, self.image_shape))
        return f"RegionDataset({len(self)} of {self.global_length} items; [{rows}] of images of {whole})"


def _places(cut: Any) -> tuple[int | str, ...]:
    """What `cut` names, as a tuple."""
    places = (cut,) if isinstance(cut, int | str) else tuple(cut) if isinstance(cut, Sequence) else ()
    if not places or not all(isinstance(place, int | str) for place in places):
        raise ArgumentError(f"expected cut to be a place or a key, or several of them, got {cut!r}")
    return places


def _dims(dims: Any, grid: ProcessGrid) -> int:
    """How many last dims are the image's."""
    if dims is None:
        return 3 if grid.sizes["depth"] > 1 else 2
    if isinstance(dims, bool) or not isinstance(dims, int):
        raise ArgumentError(
            f"expected dims, the number of an image's last dims that are cut, to be an int, got {dims!r}"
        )
    return dims


def _order_problem(batch_size: Any, seed: Any, items: int, replicas: int, drop_last: bool) -> str | None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        return f"expected seed to be an int >= 0 or None, got {seed!r}"
    if batch_size is None:
        return None
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < replicas:
        return (
            f"expected batch_size, of the whole grid, to be an int of at least {replicas}, one item for each rank "
            f"along 'data', got {batch_size!r}"
        )
    rest = items % batch_size
    if 0 < rest < replicas and not drop_last:
        return (
            f"the last batch of {items} items in batches of {batch_size} has {rest}, too few for {replicas} ranks "
            "along 'data'. Use drop_last=True or another batch_size"
        )
    return None
