"""scatter_regions along `data`, and for ranks without a data set: all ranks together have every tile of every image."""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tests._worlds import ranks
from torchmn import ProcessGrid
from torchmn.data import MicroBatches, scatter_regions
from torchmn.datasets import ImageSet
from torchmn.errors import ArgumentError
from torchmn.training import create_multi_node_evaluator


def images_and_labels(count):
    return torch.arange(count * 42.0).view(count, 1, 6, 7), torch.arange(count)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [1, 8, 11])
@ranks(4, on=("threads", "mpi"))
def test_samples_are_distributed_over_replicas(comm, count, shuffle):
    images, labels = images_and_labels(count)
    grid = ProcessGrid(comm, data=2, height=2)
    tiles = scatter_regions((images, labels), grid, shuffle=shuffle, seed=5 if shuffle else None)
    own = [int(label) for _, label in tiles.unique()]
    replicas = grid.replicas.allgather_obj((len(tiles), own))
    assert {length for length, _ in replicas} == {-(-count // 2)}, "equally many steps"
    assert sorted(label for _, labels in replicas for label in labels) == list(range(count)), "each sample once"
    for tile, label in tiles:
        assert torch.equal(torch.cat(grid.tiles.allgather(tile), -2), images[int(label)])


@ranks(4, on="threads")
def test_an_evaluation_of_distributed_tiles_counts_every_sample_once(comm):
    images, labels = images_and_labels(7)
    grid = ProcessGrid(comm, data=2, width=2)
    tiles = scatter_regions((images, labels), grid)

    def mean(loader):
        values = torch.cat([label.double() for _, label in loader])
        return {"label": values.mean().item()}

    evaluate = create_multi_node_evaluator(mean, grid.replicas)
    assert evaluate(DataLoader(tiles, batch_size=2)) == {"label": pytest.approx(3.0, rel=1e-12)}


@ranks(4, on="threads")
def test_micro_batches_of_distributed_samples_are_refused(comm):
    grid = ProcessGrid(comm, data=2, height=2)
    tiles = scatter_regions(images_and_labels(12), grid)
    order = RandomSampler(tiles, generator=torch.Generator().manual_seed(1))
    with pytest.raises(ArgumentError, match=r"sampler over all samples.*replicated=True"):
        list(MicroBatches(BatchSampler(order, 4, False), grid))
    whole = scatter_regions(images_and_labels(12), grid, replicated=True)
    order = RandomSampler(whole, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(whole, batch_sampler=MicroBatches(BatchSampler(order, 4, False), grid))
    seen = [int(label) for _, labels in loader for label in labels]
    assert sorted(label for labels in grid.replicas.allgather_obj(seen) for label in labels) == list(range(12))


SOURCES = {
    "tensors": lambda x, y, folder: (x, y),
    "arrays": lambda x, y, folder: (x.numpy(), y.numpy()),
    "memory-mapped": lambda x, y, folder: (mapped(folder / "x.npy", x), y.numpy()),
    "images alone": lambda x, y, folder: x,
    "TensorDataset": lambda x, y, folder: TensorDataset(x, y),
    "ImageSet": lambda x, y, folder: ImageSet("test", x, y),
    "items": lambda x, y, folder: [{"image": image, "label": int(label)} for image, label in zip(x, y, strict=True)],
}


def mapped(path, x):
    np.save(path, x.numpy())
    return np.load(path, mmap_mode="r")


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 2}, {"batch_size": 4}], ids=str)
@pytest.mark.parametrize("source", SOURCES)
@ranks(4, on="threads")
def test_ranks_without_a_data_set_receive_their_tiles(comm, source, options, tmp_path):
    images, labels = images_and_labels(10)
    folder = tmp_path / str(comm.rank)
    folder.mkdir()
    data = SOURCES[source](images, labels, folder)
    grid = ProcessGrid(comm, data=2, height=2)
    options = {**options, "cut": "image" if source == "items" else 0}
    expected = scatter_regions(data, grid, **options)
    for nothing in (None, []):
        got = scatter_regions(data if comm.rank in (0, 2) else nothing, grid, **options)
        assert got.indices.equal(expected.indices) and got.image_shape == (1, 6, 7)
        assert (got.region, got.repeated, got.batch_size) == (expected.region, expected.repeated, expected.batch_size)
        for mine, other in zip(got, expected, strict=True):
            parts = [x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else (x,) for x in (mine, other)]
            for one, same in zip(*parts, strict=True):
                assert type(one) is type(same) and torch.equal(torch.as_tensor(one), torch.as_tensor(same))


@ranks(4, on=("mpi", "gloo"))
def test_tiles_are_sent_across_processes(comm):
    images, labels = images_and_labels(9)
    grid = ProcessGrid(comm, height=2, width=2)
    tiles = scatter_regions(TensorDataset(images, labels) if comm.rank == 0 else None, grid)
    rows, columns = (interval.as_slice() for interval in tiles.region)
    for index, (tile, label) in enumerate(tiles):
        assert torch.equal(tile, images[index, :, rows, columns]) and int(label) == index
