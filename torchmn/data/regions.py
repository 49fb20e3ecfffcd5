"""`scatter_regions`: a map-style data set of this rank's tile of every image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid, checked_grid
from torchmn.data import same_data
from torchmn.data.partition import IndexRange, draw_seed, permutation
from torchmn.data.region_sources import ColumnSource, ItemSource, Region, Tiles, ZippedColumns, source_of
from torchmn.data.same_data import compare_facts, has_items, selection
from torchmn.data.scatter_items import scatter_items
from torchmn.data.scattered import ScatteredDataset
from torchmn.errors import ArgumentError, HaloError
from torchmn.geometry import Interval, owned

ROOT = 0
"""The rank of a grid that sends tiles to the ranks without a data set."""

_OPERATION = "scatter_regions"


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
    """Returns this rank's tile of every image, with whole labels; all ranks of the grid must call.

    Args:
        dataset: map-style, with items (image, label, ...), or a tuple (images, labels) of arrays or tensors. Data in
            memory is copied, the tile only; memory-mapped and sliceable files are read tile by tile. All ranks pass
            the same data set; a rank that passes None or an empty one receives its tiles from rank 0.
        grid: the process grid; a communicator means its squarest grid.
        batch_size: of all ranks together. Each rank along `data` then gets its part of every batch of the serial run,
            in order: iterate with `DataLoader(tiles, batch_size=tiles.batch_size)`. None: each rank along `data` gets
            equally many samples, as `scatter_dataset` distributes them.
        shuffle: take the samples in the random order of `seed`, which is the same for all grids.
        seed: an int >= 0; None draws one from rank 0's random state.
        drop_last: leave out the last batch if it is not full; only with `batch_size`.
        cut: the elements of an item that are images: (0, 1) for image and mask, keys for dicts.
        dims: the number of last dims that are cut; default 2, or 3 on a grid with depth.
        replicated: every rank along `data` keeps all samples, for `MicroBatches`.
        compare_items: see `scatter_dataset`.

    Returns:
        A data set of items (tile, label, ...).

    Raises:
        ArgumentError: on every rank, for a wrong argument.
        HaloError: on every rank that has the data set, for images with fewer rows than ranks; ArgumentError on others.
        MismatchError: on every rank, if arguments or data sets differ between ranks.
    """
    grid = checked_grid(grid, _OPERATION)
    sampling = _Sampling(batch_size, bool(shuffle), seed, bool(drop_last), bool(replicated))
    return _scatter(_examine(dataset, grid, cut, dims), grid, sampling, bool(compare_items))


@dataclass(frozen=True)
class _Sampling:
    """Which samples the ranks along `data` get, in which order: the options of `scatter_regions`."""

    batch_size: int | None
    shuffle: bool
    seed: int | None
    drop_last: bool
    replicated: bool

    def problem(self, total: int | None, replicas: int) -> str | None:
        """Returns why `total` samples cannot be distributed over `replicas` ranks along `data`, or None."""
        seed, batch_size = self.seed, self.batch_size
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            return f"expected seed to be an int >= 0 or None, got {seed!r}"
        if batch_size is None:
            return None
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < replicas:
            return (
                f"expected batch_size, of the whole grid, to be an int of at least {replicas}, one item for each rank "
                f"along 'data', got {batch_size!r}"
            )
        if self.replicated:
            return "expected either batch_size, which distributes samples along 'data', or replicated=True, got both"
        rest = (total or 0) % batch_size
        if 0 < rest < replicas and not self.drop_last:
            return (
                f"the last batch of {total} items in batches of {batch_size} has {rest}, too few for {replicas} ranks "
                "along 'data'. Use drop_last=True or another batch_size"
            )
        return None

    def order(self, comm: Communicator, total: int) -> Tensor:
        """Returns all samples in the order of the serial run: (total,) int64, the same on all ranks."""
        if not self.shuffle:
            return permutation(total, None)
        return permutation(total, draw_seed(comm, ROOT) if self.seed is None else self.seed)

    def rows(self, order: Tensor, replicas: int, replica: int) -> tuple[Tensor, int]:
        """Returns one replica's samples, and how many of them, the last ones, belong to another replica as well."""
        if self.batch_size is not None:
            batches = order.split(self.batch_size)
            full = [batch for batch in batches if len(batch) == self.batch_size or not self.drop_last]
            parts = [batch[owned(len(batch), replicas, replica).as_slice()] for batch in full]
            return (torch.cat(parts) if parts else order[:0]), 0
        parts, part = (1, 0) if self.replicated else (replicas, replica)
        taken = IndexRange.of(len(order), parts, part, equal=True)
        return order[taken.indices()], taken.repeated


@dataclass
class _LocalData:
    """This rank's data set and region, or the problem with them."""

    dims: int | None
    cut: tuple[int | str, ...] = ()
    region: Region | None = None
    source: ColumnSource | ItemSource | None = None
    total: int | None = None
    shapes: tuple = ()
    selection: str | None = None
    problem: str | None = None
    error: type[ArgumentError | HaloError] = ArgumentError


class _RankData(NamedTuple):
    """The data and place of a rank in the grid, as exchanged between all ranks."""

    total: int | None
    shapes: tuple[tuple[int, ...], ...]
    selection: str | None
    place: tuple[int, ...]
    replica: int

    def facts(self) -> tuple[str, ...]:
        """Returns what must be equal on all ranks that have a data set."""
        facts = (f"{self.total} items", f"images {self.shapes}")
        if self.selection is None:
            return facts
        return (*facts, f"chosen items (give random_split the same generator) {self.selection}")


def _examine(dataset: Any, grid: ProcessGrid, cut: int | str | Sequence[int | str], dims: int | None) -> _LocalData:
    local = _LocalData(dims)
    try:
        local.cut = _checked_cut(cut)
        local.dims = dims = _checked_dims(dims, grid)
        local.region = Region(grid.axes_of(dims), grid.parts_of(dims), grid.place_of(dims))
        is_empty = dataset is None or (hasattr(dataset, "__len__") and len(dataset) == 0)
        if grid.comm.rank == ROOT or not is_empty:
            local.source = source_of(dataset, local.cut)
            local.total = len(local.source)
            local.shapes = local.source.image_shapes() if local.total else ()
        for shape in local.shapes:
            local.region.intervals(shape)
    except (ArgumentError, HaloError) as error:
        local.problem, local.error = str(error), type(error)
    except Exception as error:  # a user's data set may raise anything
        local.problem = f"the data set raised {type(error).__name__}: {error}"
    else:
        local.selection = selection(dataset)
    return local


def _scatter(local: _LocalData, grid: ProcessGrid, sampling: _Sampling, compare_items: bool) -> RegionDataset:
    comm, replicas, replica = grid.comm, grid.sizes["data"], grid.place["data"]
    ranks = _agree(local, grid, sampling, compare_items)
    owners = [rank for rank, data in enumerate(ranks) if has_items(data.total, rank, ROOT)]
    compare_facts(comm, _OPERATION, {rank: ranks[rank].facts() for rank in owners}, ROOT)
    total, shapes = ranks[ROOT].total, ranks[ROOT].shapes
    region, source = local.region, local.source
    assert region is not None and total is not None, "rank 0 has a data set, or all ranks have raised"
    if len(owners) > 1:
        probes = None if source is None else source.probes()
        same_data.compare_items(comm, _OPERATION, probes, total, ROOT, wanted=compare_items)

    order = sampling.order(comm, total)
    rows, repeated = sampling.rows(order, replicas, replica)
    tiles = None
    if len(owners) < comm.size:
        sent = [
            order[:0] if rank in owners else sampling.rows(order, replicas, data.replica)[0]
            for rank, data in enumerate(ranks)
        ]
        regions = [Region(region.axes, region.parts, data.place) for data in ranks]
        tiles = _send_tiles(source, regions, sent, comm)
    if comm.rank in owners:
        assert source is not None
        takes_all = not sampling.shuffle and len(rows) == total
        tiles = source.tiles(region, None if takes_all else rows)
    assert tiles is not None
    batch_size = sampling.batch_size
    micro_batch = None if batch_size is None else len(owned(batch_size, replicas, replica))
    return RegionDataset(tiles, rows, repeated, total, shapes[0] if shapes else (), region, micro_batch)


def _agree(local: _LocalData, grid: ProcessGrid, sampling: _Sampling, compare_items: bool) -> list[_RankData]:
    """Returns the data of all ranks, which have compared their arguments."""
    problem = local.problem or sampling.problem(local.total, grid.sizes["data"])
    place = local.region.place if local.region else None
    differ = (local.total, local.shapes, None if problem else local.selection, place, grid.place["data"])
    same = {**vars(sampling), "cut": local.cut, "dims": local.dims, "compare_items": compare_items}
    try:
        ranks = grid.comm.agree(_OPERATION, problem, differ=differ, **same)
    except ArgumentError as error:
        raise local.error(str(error)) from None
    return [_RankData(*data) for data in ranks]


def _send_tiles(
    source: ColumnSource | ItemSource | None, regions: Sequence[Region], rows: Sequence[Tensor], comm: Communicator
) -> Tiles:
    """Returns the tiles that rank 0 sends to this rank: of a table, column by column."""
    table = source if comm.rank == ROOT and isinstance(source, ColumnSource) else None
    layout = comm.bcast_obj(None if table is None else (len(table.columns), table.build), ROOT)
    if layout is None:
        items = [source.tiles(region, None) for region in regions] if comm.rank == ROOT and source is not None else []
        return scatter_items(items, rows, comm, ROOT, _OPERATION)
    count, build = layout
    views = [] if table is None else [table.column_views(region) for region in regions]
    columns = [scatter_items([view[number] for view in views], rows, comm, ROOT, _OPERATION) for number in range(count)]
    return ZippedColumns(tuple(columns), build)


class RegionDataset(ScatteredDataset):
    """One rank's tiles of a data set of images; made by `scatter_regions`.

    Args:
        tiles: the items of this rank.
        indices: see the attribute.
        repeated: see the attribute.
        global_length: see the attribute.
        image_shape: see the attribute.
        region: see the attribute.
        batch_size: see the attribute.

    Attributes:
        indices: (len(self),) int64, the index of each item in the whole data set.
        repeated: how many items, the last ones, another rank along `data` has as well.
        global_length: number of items in the whole data set.
        image_shape: shape of a whole image, with channels.
        region: the interval of each cut dim that this rank holds.
        batch_size: items of one batch on this rank, if `scatter_regions` got a batch size.
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
        return f"RegionDataset({self._contents()}; [{rows}] of images of {whole})"


def _checked_cut(cut: Any) -> tuple[int | str, ...]:
    elements = (cut,) if isinstance(cut, int | str) else tuple(cut) if isinstance(cut, Sequence) else ()
    if not elements or not all(isinstance(element, int | str) for element in elements):
        raise ArgumentError(f"expected cut to be an index or a key of an item, or several of them, got {cut!r}")
    return elements


def _checked_dims(dims: Any, grid: ProcessGrid) -> int:
    if dims is None:
        return 3 if grid.sizes["depth"] > 1 else 2
    if isinstance(dims, bool) or not isinstance(dims, int):
        raise ArgumentError(
            f"expected dims, the number of an image's last dims that are cut, to be an int, got {dims!r}"
        )
    return dims
