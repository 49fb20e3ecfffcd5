"""scatter_regions and MicroBatches: the tiles of all ranks together are the serial run's batches."""

import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

import torchmn
from tests._worlds import ranks
from torchmn import ProcessGrid, run_threads
from torchmn.data import MicroBatches, scatter_regions
from torchmn.datasets import ImageSet
from torchmn.errors import ArgumentError, HaloError, MismatchError


def images_and_labels(count=10, shape=(3, 7, 9)):
    images = torch.arange(count * int(np.prod(shape)), dtype=torch.float32).view(count, *shape)
    return images, torch.arange(count) % 4


class Items(Dataset):
    """A map-style data set without public arrays."""

    def __init__(self, images, labels, form):
        self.images, self.labels, self.form = images, labels, form

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        image, label = self.images[index], int(self.labels[index])
        return {"image": image, "label": label} if self.form is dict else self.form((image, label))


SOURCES = {
    "tensors": lambda x, y, folder: (x, y),
    "arrays": lambda x, y, folder: (x.numpy(), y.numpy()),
    "memory-mapped": lambda x, y, folder: (mapped(folder / "x.npy", x), mapped(folder / "y.npy", y)),
    "TensorDataset": lambda x, y, folder: TensorDataset(x, y),
    "ImageSet": lambda x, y, folder: ImageSet("test", x, y),
    "tuples": lambda x, y, folder: Items(x, y, tuple),
    "lists": lambda x, y, folder: Items(x.numpy(), y, list),
}


def mapped(path: Path, x: torch.Tensor) -> np.ndarray:
    np.save(path, x.numpy())
    return np.load(path, mmap_mode="r")


def glued(parts, grid):
    """Returns the image, from the tiles of all ranks."""
    height, width = grid
    rows = [torch.cat(parts[row * width : (row + 1) * width], -1) for row in range(height)]
    return torch.cat(rows, -2)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("source", SOURCES)
def test_the_tiles_of_an_image_are_the_image(source, shuffle, tmp_path):
    images, labels = images_and_labels()
    data = SOURCES[source](images, labels, tmp_path)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3)) if shuffle else torch.arange(10)

    def main(comm):
        tiles = scatter_regions(data, ProcessGrid(comm, height=2, width=3), shuffle=shuffle, seed=3)
        assert len(tiles) == 10 and tiles.image_shape == (3, 7, 9) and tiles.indices.equal(order)
        return list(DataLoader(tiles, batch_size=4))

    batches = run_threads(main, 6, timeout=60)
    for number, indices in enumerate(order.split(4)):
        tiles = [torch.as_tensor(rank[number][0]) for rank in batches]
        assert torch.equal(glued(tiles, (2, 3)), images[indices])
        assert all(torch.equal(rank[number][1], labels[indices]) for rank in batches)


@pytest.mark.parametrize("grid", [(1, 1), (1, 2), (2, 2), (3, 3), (4, 4)], ids=str)
def test_mnist_on_square_and_other_grids(grid):
    digits = torchmn.datasets.mnist("test")

    def main(comm):
        tiles = scatter_regions(digits, ProcessGrid(comm, height=grid[0], width=grid[1]))
        tile, label = tiles[17]
        assert label == digits[17][1] and len(tiles) == len(digits)
        return tile

    assert torch.equal(glued(run_threads(main, grid[0] * grid[1], timeout=60), grid), digits.images[17])


def test_a_communicator_means_its_squarest_grid_and_channels_are_not_cut():
    images = torch.rand(2, 3, 32, 32)
    tiles = run_threads(lambda comm: scatter_regions((images, torch.zeros(2)), comm)[1][0], 4, timeout=60)
    assert tiles[0].shape == (3, 16, 16) and torch.equal(glued(tiles, (2, 2)), images[1])


@ranks(2, on="threads")
def test_whole_images_in_memory_are_not_kept(comm):
    images, labels = images_and_labels()
    tiles = scatter_regions((images, labels), ProcessGrid(comm, height=2))
    assert tiles[0][0].untyped_storage().nbytes() == 10 * tiles[0][0].nbytes < images.nbytes


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [4, 5])
@ranks(4, on="threads")
def test_micro_batches_together_are_the_serial_batches(comm, batch_size, drop_last):
    images, labels = images_and_labels(count=11 if drop_last else 4 * batch_size - 2)
    grid = ProcessGrid(comm, data=2, width=2)
    tiles = scatter_regions((images, labels), grid, batch_size, shuffle=True, seed=1, drop_last=drop_last)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    serial = list(BatchSampler(order.tolist(), batch_size, drop_last))
    mine = list(DataLoader(tiles, batch_size=tiles.batch_size))
    assert len(mine) == len(serial)
    for indices, (tile, label) in zip(serial, mine, strict=True):
        whole = torch.cat(grid.replicas.allgather(tile))
        expected = images[indices][..., tiles.region[1].as_slice()]
        assert torch.equal(whole, expected)
        assert torch.equal(torch.cat(grid.replicas.allgather(label)), labels[indices])


@ranks(4, on=("threads", "mpi"))
def test_the_batches_of_any_sampler_are_split_in_each_epoch(comm):
    images, labels = images_and_labels()
    grid = ProcessGrid(comm, data=2, height=2)
    tiles = scatter_regions((images, labels), grid, replicated=True)

    def serial_sampler():
        order = RandomSampler(labels, generator=torch.Generator().manual_seed(7))
        return BatchSampler(order, 3, drop_last=True)

    expected, batches = serial_sampler(), MicroBatches(serial_sampler(), grid)
    loader = DataLoader(tiles, batch_sampler=batches)
    seen = []
    for _ in range(2):
        for indices, (tile, _) in zip(expected, loader, strict=True):
            whole = torch.cat(grid.replicas.allgather(tile))
            assert torch.equal(whole, images[indices][..., tiles.region[0].as_slice(), :])
            seen.append(indices)
    assert len(batches) == 3 and seen[:3] != seen[3:]


@ranks(2, on="threads")
def test_micro_batches_that_differ_or_are_too_small_raise_on_every_rank(comm):
    grid = ProcessGrid(comm, data=2)
    with pytest.raises(MismatchError, match="disagree in MicroBatches"):
        list(MicroBatches([[0, 1], [2, 3 + comm.rank]], grid))
    with pytest.raises(ArgumentError, match="batch 1 has 1 items, too few for 2 ranks along 'data'"):
        list(MicroBatches([[0, 1], [2]], grid))


@ranks(2, on="threads")
def test_masks_are_cut_like_images(comm):
    images, _ = images_and_labels()
    masks = images[:, 0].long()
    region = (..., slice(0, 4) if comm.rank == 0 else slice(4, 7), slice(None))
    for data, cut in (((images, masks), (0, 1)), (Items(images, masks[:, 0, 0], dict), ("image",))):
        tiles = scatter_regions(data, ProcessGrid(comm, height=2), cut=cut)
        item = tiles[5]
        image = item["image"] if isinstance(item, dict) else item[0]
        assert torch.equal(image, images[5][region])
        if not isinstance(item, dict):
            assert torch.equal(item[1], masks[5][region])


class Pair(NamedTuple):
    name: str
    image: torch.Tensor


@ranks(2, on="threads")
def test_cut_may_be_negative_and_named_tuples_are_kept(comm):
    images, labels = images_and_labels()
    grid, mine = ProcessGrid(comm, height=2), slice(0, 4) if comm.rank == 0 else slice(4, 7)
    items = [Pair(str(number), image) for number, image in enumerate(images)]
    item = scatter_regions(items, grid, cut=-1)[5]
    assert item.name == "5" and torch.equal(item.image, images[5][:, mine])
    assert torch.equal(scatter_regions((labels, images), grid, cut=(-1,))[5][1], images[5][:, mine])


@ranks(2, on="threads")
def test_what_is_cut_must_exist_and_be_the_same_on_every_rank(comm):
    images, labels = images_and_labels()
    grid = ProcessGrid(comm, height=2)
    with pytest.raises(ArgumentError, match="expected items with an element 7 to cut"):
        scatter_regions(Items(images, labels, tuple), grid, cut=(0, 7))
    with pytest.raises(MismatchError, match=r"cut \(1,\)"):
        scatter_regions((images, images), grid, cut=comm.rank)
    with pytest.raises(MismatchError, match="dims 3"):
        scatter_regions(images, grid, dims=2 + comm.rank)
    with pytest.raises(ArgumentError, match="got a list of both"):
        scatter_regions([images, labels], grid)


@ranks(2, on="threads")
def test_a_table_of_labels_is_never_cut_along_its_rows(comm):
    images, _ = images_and_labels()
    grid, table = ProcessGrid(comm, height=2), torch.arange(40).view(10, 4)
    with pytest.raises(HaloError, match=r"expected images of at least 2 dims, got shape \(4,\)"):
        scatter_regions((images, table), grid, cut=(0, 1))
    masks = torch.zeros(10, 7, 8 + comm.rank)
    with pytest.raises(MismatchError, match=r"images \(\(3, 7, 9\), \(7, 8\)\)"):
        scatter_regions((images, masks), grid, cut=(0, 1))


@ranks(2, on="threads")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cut": None}, "rank 1 of 2: .*expected cut to be an index or a key of an item, or several of them, got None"),
        ({"cut": ()}, r"expected cut to be an index .*got \(\)"),
        ({"cut": (0.5,)}, r"expected cut to be an index .*got \(0.5,\)"),
        ({"dims": "2"}, "expected dims, .*to be an int, got '2'"),
    ],
)
def test_options_that_one_rank_gets_wrong_are_an_error_on_all(comm, options: dict, words: str):
    with pytest.raises(ArgumentError, match=words):
        scatter_regions(images_and_labels(), ProcessGrid(comm, height=2), **(options if comm.rank == 1 else {}))


@ranks(2, on="threads")
def test_errors_for_missing_images_name_the_elements_of_an_item(comm):
    images, labels = images_and_labels()
    grid = ProcessGrid(comm, height=2)
    with pytest.raises(ArgumentError, match=r"an element 'images' to cut, got a dict of 'image', 'label'.*cut="):
        scatter_regions(Items(images, labels, dict), grid, cut="images")
    with pytest.raises(ArgumentError, match=r"tensors or arrays, got 3.*the data set's transform"):
        scatter_regions([(3, 1)], grid)


@ranks(2, on="threads")
def test_a_slice_is_a_list_of_items(comm):
    images, labels = images_and_labels()
    grid, mine = ProcessGrid(comm, height=2), slice(0, 4) if comm.rank == 0 else slice(4, 7)
    for data in ((images, labels), Items(images, labels, tuple)):
        items = scatter_regions(data, grid)[8:1:-3]
        assert [int(label) for _, label in items] == labels[[8, 5, 2]].tolist()
        assert torch.equal(torch.stack([image for image, _ in items]), images[[8, 5, 2]][:, :, mine])


@ranks(2, on="threads")
def test_volumes_and_signals(comm):
    volumes = torch.arange(120.0).view(2, 1, 4, 3, 5)
    tiles = scatter_regions(volumes, ProcessGrid(comm, depth=2))
    assert torch.equal(tiles[1], volumes[1][:, 2 * comm.rank : 2 * comm.rank + 2])
    signals = torch.arange(54.0).view(2, 3, 9)
    tiles = scatter_regions(signals, ProcessGrid(comm, width=2), dims=1)
    assert torch.equal(tiles[-1], signals[1][:, slice(0, 5) if comm.rank == 0 else slice(5, 9)])
    with pytest.raises(IndexError):
        tiles[2]


@ranks(2, on="threads")
def test_region_data_sets_work_in_worker_processes(comm):
    images, labels = images_and_labels()
    tiles = scatter_regions(ImageSet("test", images, labels), ProcessGrid(comm, height=2), 4)
    again = pickle.loads(pickle.dumps(tiles))
    assert torch.equal(again[3][0], tiles[3][0]) and again[3][1] == tiles[3][1]


class Recorded(np.memmap):
    """A memory-mapped file that records its indices."""

    asked: list

    def __getitem__(self, index):
        Recorded.asked.append(index)
        return np.asarray(super().__getitem__(index))


def test_of_a_memory_mapped_array_only_requested_tiles_are_read(tmp_path):
    np.arange(8 * 6 * 5, dtype=np.float32).tofile(tmp_path / "images")
    images = Recorded(tmp_path / "images", np.float32, "r", shape=(8, 6, 5))
    whole = np.array(images)
    Recorded.asked = []
    tiles = run_threads(lambda comm: scatter_regions(images, ProcessGrid(comm, height=2)), 2, timeout=30)
    assert all(asked == (asked[0], 3, slice(0, 5)) for asked in Recorded.asked), "ranks compare a line of an image"
    Recorded.asked = []
    tile = tiles[1][3]
    assert np.array_equal(tile, whole[3, 3:6]) and not np.shares_memory(tile, images)
    assert Recorded.asked == [(3, slice(3, 6), slice(0, 5))]


@ranks(2, on="threads")
def test_an_array_in_a_file_is_read_slice_by_slice(comm):
    class InFile:
        """An array-like in a file, as of zarr 3: sliced like an array, without a length."""

        def __init__(self):
            self.array, self.asked = np.arange(4 * 3 * 6).reshape(4, 3, 6), []
            self.shape, self.dtype = self.array.shape, self.array.dtype

        def __getitem__(self, index):
            self.asked.append(index)
            return self.array[index]

    images = InFile()
    tiles = scatter_regions((images, np.arange(4)), ProcessGrid(comm, width=2))
    assert images.asked == [(place, 1, slice(0, 6)) for place in range(4)], "ranks compare a line of an image"
    images.asked = []
    mine = slice(0, 3) if comm.rank == 0 else slice(3, 6)
    tile, label = tiles[2]
    assert np.array_equal(tile, images.array[2][:, mine]) and label == 2
    assert images.asked == [(2, slice(0, 3), mine)]


@ranks(2, 3, on="threads")
def test_tiles_of_an_array_of_zarr_are_those_of_the_array(comm, tmp_path):
    zarr = pytest.importorskip("zarr", minversion="3")
    values = np.arange(5 * 4 * 7, dtype=np.float32).reshape(5, 4, 7)
    if comm.rank == 0:
        zarr.save_array(tmp_path / "images.zarr", values)
    comm.barrier()
    images = zarr.open_array(tmp_path / "images.zarr", mode="r")
    grid = ProcessGrid(comm, width=comm.size)
    tiles = scatter_regions((images, np.arange(5)), grid)
    expected = scatter_regions((values, np.arange(5)), grid)
    assert len(tiles) == 5
    for (tile, label), (expected_tile, expected_label) in zip(tiles, expected, strict=True):
        assert np.array_equal(tile, expected_tile) and label == expected_label


@ranks(4, on="threads")
def test_unsuitable_data_and_grids_are_refused_on_every_rank(comm):
    grid = ProcessGrid(comm, height=4)
    with pytest.raises(HaloError, match=r"\(1, 3, 8\) have 3 along 'height', too few for 4 ranks.*at most 3"):
        scatter_regions(torch.zeros(2, 1, 3, 8), grid)
    with pytest.raises(MismatchError, match=r"not have the same data; nothing was sent:\n.*2 items.*\n.*1: 3 items"):
        scatter_regions(torch.zeros(2 + (comm.rank == 1), 1, 8, 8), grid)
    with pytest.raises(
        ArgumentError, match=r"rank 0 of 4: scatter_regions: expected a map-style data set, .* got None"
    ):
        scatter_regions(None if comm.rank == 0 else torch.zeros(2, 1, 8, 8), grid)
    with pytest.raises(ArgumentError, match=r"expected either batch_size, .* or replicated=True, got both"):
        scatter_regions(torch.zeros(8, 1, 8, 8), grid, 4, replicated=True)
    with pytest.raises(ArgumentError, match=r"elements 0\.\.1 of an item, got \(2,\)"):
        scatter_regions((torch.zeros(2, 1, 8, 8), torch.zeros(2)), grid, cut=(2,))
    replicas = ProcessGrid(comm, data=4)
    with pytest.raises(ArgumentError, match=r"an int of at least 4, .*, got 3"):
        scatter_regions(torch.zeros(9, 1, 8, 8), replicas, 3)
    with pytest.raises(ArgumentError, match="last batch of 9 items in batches of 8 has 1, too few for 4 ranks"):
        scatter_regions(torch.zeros(9, 1, 8, 8), replicas, 8)
    assert len(scatter_regions(torch.zeros(9, 1, 8, 8), replicas, 8, drop_last=True)) == 2


@ranks(2, on="threads")
def test_without_a_seed_all_ranks_draw_the_same_order(comm):
    tiles = scatter_regions(torch.zeros(30, 1, 8, 8), ProcessGrid(comm, height=2), shuffle=True)
    orders = comm.allgather(tiles.indices)
    assert torch.equal(orders[0], orders[1]) and sorted(orders[0].tolist()) == list(range(30))
    again = scatter_regions(torch.zeros(30, 1, 8, 8), ProcessGrid(comm, height=2), shuffle=True)
    assert not torch.equal(tiles.indices, again.indices), "each call draws an order"
