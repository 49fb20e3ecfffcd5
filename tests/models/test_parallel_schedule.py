"""Pretraining and fine-tuning on grids of ranks: all costs and final weights equal those of one rank."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchmn
from tests._worlds import ranks
from torchmn import ProcessGrid
from torchmn.datasets import mnist
from torchmn.errors import ArgumentError, MismatchError, ParallelizeError
from torchmn.models import (
    MNIST,
    LabelledBatches,
    Momentum,
    SparseAutoencoder,
    fine_tune,
    optimal_stimuli,
    pretrain,
    spot_check,
)
from torchmn.parallel import full_state_dict, parallelize

EXACT = {"rtol": 1e-8, "atol": 1e-8}


@cache
def digits(count: int, batch_size: int, every: int) -> LabelledBatches:
    """The first digits of the sample, in float64, of each row and column every `every`-th pixel."""
    sample = mnist("train")
    return LabelledBatches(sample.images[:count, :, ::every, ::every].double(), sample.labels[:count], batch_size)


def model_of(name: str, tied: bool = True) -> SparseAutoencoder:
    """The published network, or one of three stacks for images of 14 x 14 that trains in a second."""
    if name == "published":
        model = MNIST.model(dtype=torch.float64, tied=tied)
    else:
        model = SparseAutoencoder(3, in_size=14, maps=4, kernel=(3, 2, 2), pool=2, tied=tied, dtype=torch.float64)
    generator = torch.Generator().manual_seed(8)  # not the default one: ranks may be threads
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1, generator=generator)
    return model.unit_norm_()


def batches_of(name: str) -> LabelledBatches:
    return digits(500, 250, every=1) if name == "published" else digits(100, 50, every=2)


def train(model: SparseAutoencoder, batches) -> list[float]:
    """Two epochs of pretraining, two of fine-tuning: the cost of each step."""
    costs: list[float] = []

    def note(step) -> None:
        costs.extend([step.cost.reconstruction, step.cost.sparsity])

    pretrain(model, batches, epochs=2, learning_rate=0.01, progress=note)
    fine_tune(model, batches, epochs=2, momentum=Momentum(), progress=lambda step: costs.append(step.cost))
    return costs


@cache
def serial(name: str, tied: bool) -> tuple[list[float], dict[str, Tensor], list]:
    model = model_of(name, tied)
    costs = train(model, batches_of(name))
    return costs, model.state_dict(), spot_check(model, batches_of(name))


def own_batches(batches: LabelledBatches, grid: ProcessGrid) -> list:
    """The images of this rank's copy of the model: shares of every batch that are not equal."""
    copies, place = grid.sizes["data"], grid.place["data"]
    return [tuple(part.tensor_split(copies)[place] for part in pair) for pair in batches]


def check(comm, mode: str, sizes: dict[str, int], name: str = "small", tied: bool = True) -> None:
    grid = ProcessGrid(comm, **sizes)
    model = parallelize(model_of(name, tied), grid, mode)
    batches = own_batches(batches_of(name), grid)
    costs = train(model, batches)
    # Computed once also where ranks are processes.
    expected_costs, expected_state, expected_units = comm.bcast_obj(serial(name, tied) if comm.rank == 0 else None)
    assert_close(costs, expected_costs, **EXACT)
    for key, value in full_state_dict(model).items():
        assert_close(value, expected_state[key], **EXACT)
    found = spot_check(model, batches)
    assert [(best.label, best.unit) for best in found] == [(best.label, best.unit) for best in expected_units]
    assert [best.auc for best in found] == pytest.approx([best.auc for best in expected_units])


@pytest.fixture(autouse=True)
def _serial_run_first():
    """Once, in the test's own thread: ranks that are threads would all compute it."""
    for name, tied in (("small", True), ("small", False), ("published", True)):
        serial(name, tied)


@ranks(2, on="threads")
def test_on_1_by_2_tiles(comm):
    check(comm, "halopar", {"width": 2}, name="published")
    check(comm, "halopar", {"height": 2}, tied=False)


@ranks(4, on="threads")
def test_on_2_by_2_tiles(comm):
    check(comm, "halopar", {"height": 2, "width": 2}, name="published")


@ranks(6, on="threads")
def test_on_3_by_2_tiles(comm):
    check(comm, "halopar", {"height": 3, "width": 2}, name="published")


@ranks(6, on="threads")
def test_on_tiles_and_copies(comm):
    check(comm, "halodatapar", {"data": 3, "width": 2})


@ranks(3, on="threads")
def test_on_copies(comm):
    check(comm, "datapar", {"data": 3})


@ranks(2, on="threads")
def test_with_the_classifier_cut_and_the_filters_whole(comm):
    check(comm, "modelpar", {"width": 2})


@ranks(2, 4, on="mpi", timeout=120)
def test_across_processes(comm):
    check(comm, "halopar", {"height": 2, "width": comm.size // 2}, name="published")


@ranks(2, on="gloo")
def test_across_processes_without_mpi(comm):
    check(comm, "halopar", {"height": 2})


@ranks(2, on="threads")
def test_tiles_are_taken_as_whole_images_are(comm):
    grid = ProcessGrid(comm, width=2)
    model = model_of("small")
    parallel, other = parallelize(model, grid, "halopar"), parallelize(model, grid, "halopar")
    whole = digits(20, 10, 2)
    tiles = torchmn.data.scatter_regions((whole.images, whole.labels), grid)
    loader = torch.utils.data.DataLoader(tiles, batch_size=10)
    assert next(iter(loader))[0].shape == (10, 1, 14, 7)
    costs = pretrain(parallel, loader, epochs=1)
    assert costs == pretrain(other, whole, epochs=1)
    with pytest.raises(ParallelizeError, match=r"expected this rank's tile \(3, 1, 14, 7\) of the images"):
        pretrain(parallel, [torch.zeros(3, 1, 14, 9, dtype=torch.float64)])


@ranks(2, on="threads")
def test_pictures_are_made_on_one_rank(comm):
    parallel = parallelize(model_of("small"), ProcessGrid(comm, width=2), "halopar")
    with pytest.raises(ArgumentError, match="expected a plain model, got a parallel one"):
        optimal_stimuli(parallel, digits(4, 4, 2).images, [(0, 0, 0)])
    plain = model_of("small")
    plain.load_state_dict(full_state_dict(parallel))
    optimal_stimuli(plain, digits(4, 4, 2).images, [(0, 0, 0)], steps=1)


@ranks(2, on="threads", timeout=30)
def test_what_ranks_do_not_agree_on_is_an_error_on_every_rank(comm):
    grid = ProcessGrid(comm, data=2)
    model = parallelize(model_of("small"), grid, "datapar")
    batches = own_batches(digits(20, 10, 2), grid)
    with pytest.raises(MismatchError, match=r"learning_rate"):
        pretrain(model, batches, learning_rate=0.1 * (1 + comm.rank))
    with pytest.raises(MismatchError, match=r"momentum"):
        fine_tune(model, batches, momentum=Momentum(first=0.5 * comm.rank))
    with pytest.raises(ArgumentError, match=r"rank 1.*got the iterator"):
        pretrain(model, iter(batches) if comm.rank == 1 else batches)


@ranks(2, on="threads", timeout=30)
def test_more_batches_on_one_rank_than_on_another_are_an_error_on_every_rank(comm):
    grid = ProcessGrid(comm, data=2)
    model = parallelize(model_of("small"), grid, "datapar")
    batches = own_batches(digits(20, 10, 2), grid)[: 1 + comm.rank]
    with pytest.raises(MismatchError, match="an epoch of pretrain"):
        pretrain(model, batches)


@ranks(4, on="threads")
def test_layer_by_layer_as_with_one_exchange_for_each_stack(comm):
    """A hook on a layer makes every layer run separately, with its own exchange."""
    grid = ProcessGrid(comm, height=2, width=2)
    watched, quick = (parallelize(model_of("small"), grid, "halopar") for _ in range(2))
    seen = []
    watched.stacks[0].norm.register_forward_hook(lambda *_: seen.append(1))
    batches = digits(20, 10, 2)
    assert_close(train(watched, batches), train(quick, batches), **EXACT)
    expected = full_state_dict(quick)
    for key, value in full_state_dict(watched).items():
        assert_close(value, expected[key], **EXACT)
    assert seen


@ranks(6, on="threads")
def test_ranks_without_a_part_of_the_features_take_part(comm):
    def small():
        sizes = {"in_size": 7, "maps": 2, "kernel": 2, "pool": 2, "dtype": torch.float64}
        model = SparseAutoencoder(3, **sizes)  # 7 → 6 → 5, 5 → 4 → 3, 3 → 2 → 1
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.1, 0.1, generator=generator)
        return model.unit_norm_()

    whole = digits(20, 10, 2)
    batches = LabelledBatches(whole.images[:, :, 3:10, 4:11], whole.labels, 10)
    serial_model, parallel = small(), parallelize(small(), ProcessGrid(comm, height=3, width=2), "halopar")
    assert_close(train(parallel, batches), train(serial_model, batches), **EXACT)


@ranks(2, on="threads", timeout=30)
def test_progress_may_be_told_on_one_rank_only(comm):
    model = parallelize(model_of("small"), ProcessGrid(comm, width=2), "halopar")
    seen = []
    costs = pretrain(model, digits(20, 10, 2), epochs=1, progress=seen.append if comm.rank else None)
    assert len(seen) == (6 if comm.rank else 0)
    other = parallelize(model_of("small"), ProcessGrid(comm, width=2), "halopar")
    silent = pretrain(other, digits(20, 10, 2), epochs=1)
    assert [c[0].total for c in costs] == pytest.approx([c[0].total for c in silent])


@pytest.mark.parametrize("given", ["whole images", "tiles"])
@ranks(2, on="threads")
def test_ranks_that_share_images_but_shuffle_differently_are_told(comm, given):
    grid = ProcessGrid(comm, height=2)
    model = parallelize(model_of("small"), grid, "halopar")
    images, labels = next(iter(batches_of("small")))
    order = torch.arange(len(images)) if comm.rank == 0 else torch.arange(len(images)).flip(0)
    mine = images[order] if given == "whole images" else images[order, :, 7 * comm.rank : 7 * comm.rank + 7]
    for work in (pretrain, fine_tune, lambda model, batches: spot_check(model, batches)):
        with pytest.raises(MismatchError, match="whole inputs"):
            work(model, [(mine, labels[order])])
