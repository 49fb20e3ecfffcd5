"""Each rank's tile of every image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid, checked_grid
from torchmn.data import same_data
from torchmn.data.partition import Window, permutation
from torchmn.data.region_sources import Columns, Items, Region, Row, Tiles, source_of
from torchmn.data.same_data import compare_facts, has_items, selection
from torchmn.data.scatter_items import deliver
from torchmn.data.scattered import ScatteredDataset
from torchmn.data.seeds import drawn_seed
from torchmn.errors import ArgumentError, HaloError
from torchmn.geometry import Interval, owned

ROOT = 0
"""Of a grid, the rank whose items are sent to ranks that have none."""


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
    replicated: bool = False,
    compare_items: bool = True,
) -> RegionDataset:
    """Returns this rank's tile of every image, labels whole, as a map-style data set; every rank of the grid calls it.

    A rank other than rank 0 that passes None, or an empty data set, is sent its tiles by rank 0.

    Args:
        dataset: the same on every rank that has one: map-style, with items (image, label, ...); or (images, labels),
            arrays or tensors, one row per item; `torchmn.datasets.mnist()`, `cifar10(...)`. What lies in memory is
            copied, the tile only, so that the whole can be freed. Of memory-mapped arrays, and of arrays in files that
            can be sliced, only the tile is ever read, and a line of each image that ranks compare. Items of other data
            sets are read when they are asked for, and cut at once.
        grid: where this rank is; a communicator stands for its squarest grid.
        batch_size: of the whole grid, for a grid with a `data` axis: keep only this rank's micro-batches, in order.
            Then `DataLoader(tiles, batch_size=tiles.batch_size)` gives, as batch b of all ranks along `data` together,
            the serial run's batch b: replica d has its d-th part, balanced, larger parts first. Without it the ranks
            along `data` get equally many other samples, as `scatter_dataset` deals them out.
        shuffle, seed: take the items in the order of `seed`, which does not depend on the grid; without a seed, each
            call draws a new one from rank 0's random state, as `scatter_dataset` does.
        drop_last: leave out the items of a last batch that is not full (with `batch_size`).
        cut: the elements of an item that are images: (0, 1) for pairs of image and mask, keys for dicts.
        dims: how many last dims are the image's: 2, or 3 on a grid with depth.
        replicated: every rank along `data` keeps all samples, so that `MicroBatches` can deal out the batches of any
            sampler, in another order in each epoch too.
        compare_items: False where ranks have the same data set although its items do not look so: see
            `scatter_dataset`.

    Raises:
        ArgumentError: on every rank, for a wrong argument.
        HaloError: on every rank, for images with fewer rows than ranks.
        MismatchError: on every rank, if ranks pass other arguments, or data sets that are not the same.
    """
    grid = checked_grid(grid, "scatter_regions")
    comm, replicas, replica = grid.comm, grid.sizes["data"], grid.place["data"]
    here = _look(dataset, grid, cut, dims)
    source, region = here.source, here.region
    problem = here.problem or _order_problem(batch_size, seed, here.total, replicas, drop_last, replicated)
    same = {"batch_size": batch_size, "shuffle": bool(shuffle), "seed": seed, "drop_last": bool(drop_last)}
    same |= {
        "cut": here.places,
        "dims": here.dims,
        "replicated": bool(replicated),
        "compare_items": bool(compare_items),
    }
    chosen = None if problem else selection(dataset)
    differ = (here.total, here.shapes, chosen, region.place if region else None, replica)
    try:
        told = comm.agree("scatter_regions", problem, differ=differ, **same)
    except ArgumentError as error:
        raise here.kind(str(error)) from None
    assert region is not None
    total, shapes = told[ROOT][:2]
    owners = [rank for rank, its in enumerate(told) if has_items(its[0], rank, ROOT)]
    compare_facts(comm, "scatter_regions", {rank: _facts(*told[rank][:3]) for rank in owners}, ROOT)
    if len(owners) > 1:
        probes = source.probes() if source is not None else None
        same_data.compare_items(comm, "scatter_regions", probes, total, ROOT, wanted=compare_items)
    if shuffle and seed is None:
        seed = drawn_seed(comm, ROOT)
    order = permutation(total, seed if shuffle else None)

    def rows_of(replica: int) -> tuple[Tensor, int]:
        if batch_size is not None:
            return micro_batches(order, batch_size, replicas, replica, drop_last), 0
        window = Window.of(total, 1, 0, True) if replicated else Window.of(total, replicas, replica, True)
        return order[window.places()], window.repeated

    rows, repeated = rows_of(replica)
    tiles = None
    if len(owners) < comm.size:
        parts = [order[:0] if rank in owners else rows_of(its[4])[0] for rank, its in enumerate(told)]
        regions = [Region(region.axes, region.parts, its[3]) for its in told]
        tiles = _sent(source, regions, parts, comm)
    if comm.rank in owners:
        assert source is not None
        everything = not shuffle and len(rows) == total
        tiles = source.tiles(region, None if everything else rows)
    assert tiles is not None
    micro = None if batch_size is None else len(owned(batch_size, replicas, replica))
    return RegionDataset(tiles, rows, repeated, total, shapes[0] if shapes else (), region, micro)


@dataclass
class _Found:
    """What this rank has of a data set, or the problem with it."""

    dims: int | None
    places: tuple[int | str, ...] = ()
    region: Region | None = None
    source: Columns | Items | None = None
    total: int | None = None
    shapes: tuple = ()
    problem: str | None = None
    kind: type[ArgumentError | HaloError] = ArgumentError  # of the problem


def _look(dataset: Any, grid: ProcessGrid, cut: int | str | Sequence[int | str], dims: int | None) -> _Found:
    found = _Found(dims)
    try:
        found.places = _places(cut)
        found.dims = dims = _dims(dims, grid)
        found.region = Region(grid.axes_of(dims), grid.parts_of(dims), grid.place_of(dims))
        if grid.comm.rank == ROOT or not _is_nothing(dataset):
            found.source = source_of(dataset, found.places)
            found.total = len(found.source)
            found.shapes = found.source.image_shapes() if found.total else ()
        for shape in found.shapes:
            found.region.intervals(shape)
    except (ArgumentError, HaloError) as error:
        found.problem, found.kind = str(error), type(error)
    except Exception as error:  # a user's data set may raise anything
        found.problem = f"the data set raised {type(error).__name__}: {error}"
    return found


def _is_nothing(dataset: Any) -> bool:
    """Whether a rank off the root has passed no items: None, or a data set of length 0."""
    return dataset is None or (hasattr(dataset, "__len__") and len(dataset) == 0)


def _facts(total: int, shapes: Any, chosen: str | None) -> tuple[str, ...]:
    """What must be equal on ranks that have a data set."""
    facts = (f"{total} items", f"images {shapes}")
    return facts if chosen is None else (*facts, f"chosen items (give random_split the same generator) {chosen}")


def _sent(
    source: Columns | Items | None, regions: Sequence[Region], parts: Sequence[Tensor], comm: Communicator
) -> Tiles:
    """The tiles that root sends to this rank: column by column where the data set is a table."""
    is_root = comm.rank == ROOT
    table = (len(source.columns), source.build) if is_root and isinstance(source, Columns) else None
    table = comm.bcast_obj(table, ROOT)
    if table is None:
        items = [source.tiles(region, None) for region in regions] if is_root and source is not None else []
        return deliver(items, parts, comm, ROOT, "scatter_regions")
    views = [source.column_views(region) for region in regions] if is_root and isinstance(source, Columns) else []
    columns = [
        deliver([view[number] for view in views], parts, comm, ROOT, "scatter_regions") for number in range(table[0])
    ]
    return Row(tuple(columns), table[1])


def micro_batches(order: Tensor, batch_size: int, replicas: int, replica: int, drop_last: bool) -> Tensor:
    """The items of one replica, micro-batch after micro-batch: its part of each batch of `batch_size` of `order`."""
    batches = [batch for batch in order.split(batch_size) if len(batch) == batch_size or not drop_last]
    mine = [batch[owned(len(batch), replicas, replica).as_slice()] for batch in batches]
    return torch.cat(mine) if mine else order[:0]


class RegionDataset(ScatteredDataset):
    """One rank's tiles of a data set of images. Made by `scatter_regions`.

    indices: (len(self),) int64, each item's place in the whole data set
    repeated: how many items, the last ones, another rank along `data` has as its own
    global_length: number of items in the whole data set
    image_shape: of a whole image, channels included
    region: what of the image's last dims this rank holds
    batch_size: this rank's part of a batch, if `scatter_regions` was told the size of the whole batch
    """

    def __init__(
        self,
        tiles: Tiles,
        indices: Tensor,
        repeated: int,
        global_length: int,
        image_shape: tuple[int, ...],
        region: Region,
        batch_size: int | None,
    ):
        super().__init__(tiles, indices, repeated, global_length)
        self.image_shape = image_shape
        self.region: tuple[Interval, ...] = region.intervals(image_shape) if image_shape else ()
        self.batch_size = batch_size

    def __repr__(self) -> str:
        rows = ", ".join(map(str, self.region))
        whole = "x".join(map(str, self.image_shape))
        repeats = f", {self.repeated} repeated" if self.repeated else ""
        held = f"{len(self.indices)} of {self.global_length} items{repeats}"
        return f"RegionDataset({held}; [{rows}] of images of {whole})"


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


def _order_problem(
    batch_size: Any, seed: Any, items: int | None, replicas: int, drop_last: bool, replicated: bool
) -> str | None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        return f"expected seed to be an int >= 0 or None, got {seed!r}"
    if batch_size is None:
        return None
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < replicas:
        return (
            f"expected batch_size, of the whole grid, to be an int of at least {replicas}, one item for each rank "
            f"along 'data', got {batch_size!r}"
        )
    if replicated:
        return "expected either batch_size, which deals out the samples along 'data', or replicated=True, got both"
    rest = (items or 0) % batch_size
    if 0 < rest < replicas and not drop_last:
        return (
            f"the last batch of {items} items in batches of {batch_size} has {rest}, too few for {replicas} ranks "
            "along 'data'. Use drop_last=True or another batch_size"
        )
    return None
