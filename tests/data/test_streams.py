"""Iterable data sets: each rank gets its part by position, of any length, and what cannot be exact is refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from torchmn import create_multi_node_evaluator, create_multi_node_optimizer, scatter_dataset
from torchmn.data import scatter_regions
from torchmn.training import Sum, without_repeats


class Stream(IterableDataset):
    """The numbers 0 to `length` - 1, as tensors."""

    def __init__(self, length: int):
        self.length = length

    def __iter__(self):
        return (torch.tensor([float(number)]) for number in range(self.length))


class Sized(Stream):
    def __len__(self):
        return self.length


class Shuffled(Stream):
    def __iter__(self):
        order = list(range(self.length))
        random.shuffle(order)
        return iter(order)


class Once(IterableDataset):
    def __init__(self, length: int):
        self.items = iter(range(length))

    def __iter__(self):
        return self.items


def numbers(part) -> list[int]:
    return [int(item) for item in part]


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 12])
@ranks(1, 2, 3, 4, on="threads")
def test_ranks_get_equally_many_items_by_position(comm, length):
    part = scatter_dataset(Sized(length), comm)
    items = comm.allgather_obj(numbers(part))
    assert {len(each) for each in items} == {-(-length // comm.size)} == {len(part)}
    assert {item for each in items for item in each} == set(range(length))
    assert numbers(part)[: length // comm.size] == list(range(comm.rank, length, comm.size))[: length // comm.size]
    assert numbers(part) == items[comm.rank], "another epoch has the same items"


@pytest.mark.parametrize("length", [0, 1, 7, 12])
@ranks(1, 2, 3, 4, on="threads")
def test_without_equal_lengths_every_item_is_on_one_rank(comm, length):
    part = scatter_dataset(Sized(length), comm, force_equal_length=False)
    assert numbers(part) == list(range(comm.rank, length, comm.size))
    assert len(part) == len(numbers(part))


@ranks(3, on=("mpi", "gloo"), timeout=60)
def test_processes_with_a_worker_get_their_part(comm):
    loader = DataLoader(scatter_dataset(Stream(8), comm), batch_size=2, num_workers=1)
    items = comm.allgather_obj([int(item) for batch in loader for item in batch])
    assert {item for each in items for item in each} == set(range(8))
    assert len({len(each) for each in items}) == 1


def test_several_workers_are_refused_by_name():
    part = torchmn.run_threads(lambda comm: scatter_dataset(Stream(8), comm), 2)[0]
    with pytest.raises(torchmn.ArgumentError, match=r"Stream.*got 2.*num_workers=1"):
        list(DataLoader(part, num_workers=2))


@pytest.mark.parametrize("length", [12, 24])
@ranks(1, 2, 3, on="threads")
def test_training_has_the_batches_and_the_weights_of_one_rank(comm, length):
    def trained(world, part, batch_size):
        model = nn.Linear(1, 1).double()
        model.load_state_dict({"weight": torch.full((1, 1), 0.3), "bias": torch.full((1,), 0.1)})
        optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), world, model=model)
        for x in DataLoader(part, batch_size=batch_size):
            optimizer.zero_grad()
            (model(x.double()) - 3 * x).square().mean().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    alone = comm.split(comm.rank)
    got = trained(comm, scatter_dataset(Stream(length), comm), 6 // comm.size)
    torch.testing.assert_close(got, trained(alone, Stream(length), 6), rtol=1e-12, atol=0)


def mean_of(loader):
    values = torch.cat([batch.flatten() for batch in loader] or [torch.zeros(0)])
    return {"mean": values.mean(), "count": Sum(len(values))}, len(values)


@pytest.mark.parametrize("length", [2, 7, 12])
@ranks(1, 2, 3, 4, on="threads")
def test_an_evaluation_counts_every_item_once(comm, length):
    loader = DataLoader(scatter_dataset(Stream(length), comm), batch_size=2)
    result = create_multi_node_evaluator(mean_of, comm)(loader)
    assert result["count"] == length
    assert float(result["mean"]) == pytest.approx((length - 1) / 2)


@ranks(3, on="threads")
def test_an_evaluation_that_reads_the_repeated_item_is_refused(comm):
    part = scatter_dataset(Stream(7), comm)
    evaluate = create_multi_node_evaluator(lambda: mean_of(DataLoader(part, batch_size=2)), comm)
    assert_refused(comm, evaluate, "ScatteredStream", "without_repeats", kind=torchmn.ArgumentError)
    assert numbers(without_repeats(part)) == list(range(comm.rank, 7, 3))


@ranks(2, 3, on="threads")
def test_an_evaluation_without_a_number_of_samples_is_refused(comm):
    loader = DataLoader(scatter_dataset(Stream(7), comm), batch_size=2)
    evaluate = create_multi_node_evaluator(lambda loader: mean_of(loader)[0]["mean"], comm)
    assert_refused(comm, lambda: evaluate(loader), "number of samples", kind=torchmn.MismatchError)


@ranks(2, 3, on="threads")
def test_an_evaluation_of_streams_of_different_lengths_is_refused(comm):
    part = scatter_dataset(Stream(20 + 5 * comm.rank), comm)  # the first items, which ranks compare, are the same
    evaluate = create_multi_node_evaluator(mean_of, comm)
    call = lambda: evaluate(DataLoader(part, batch_size=2))  # noqa: E731
    assert_refused(comm, call, "20 on rank 0, 25 on rank 1", kind=torchmn.MismatchError)


@ranks(2, 3, on="threads")
def test_streams_that_differ_between_ranks_are_refused(comm):
    for other, words in ((Stream(5 + comm.rank), "item 5"), (Sized(comm.rank), "item 0")):
        call = lambda other=other: scatter_dataset(other, comm)  # noqa: E731
        assert_refused(comm, call, "scatter_dataset", words, "compare_items=False", kind=torchmn.MismatchError)
    assert numbers(scatter_dataset(Stream(3 + comm.rank), comm, compare_items=False))


@ranks(3, on="mpi", timeout=60)
def test_a_stream_shuffled_by_the_states_of_ranks_is_refused(comm):
    random.seed(comm.rank)
    call = lambda: scatter_dataset(Shuffled(20), comm)  # noqa: E731
    assert_refused(comm, call, "in another order", "seeded equally", kind=torchmn.MismatchError)
    random.seed(5)
    state = random.getstate()
    part = scatter_dataset(Shuffled(20), comm)
    assert random.getstate() == state, "the comparison restores the generators"
    items = comm.allgather_obj(numbers(part))
    assert {item for each in items for item in each} == set(range(20))


@ranks(2, on="threads")
def test_a_stream_that_can_be_read_once_is_not_read_before(comm):
    assert numbers(scatter_dataset(Once(6), comm)) == list(range(comm.rank, 6, 2))


@ranks(2, 3, on="threads")
def test_a_stream_on_some_ranks_only_is_refused_with_the_way_out(comm):
    for other in (None, [1, 2, 3]):
        call = lambda other=other: scatter_dataset(Stream(6) if comm.rank == 0 else other, comm)  # noqa: E731
        assert_refused(comm, call, "scatter_dataset", "create_multi_node_iterator", kind=torchmn.MismatchError)


@ranks(2, on="threads")
def test_shuffling_a_stream_is_refused(comm):
    call = lambda: scatter_dataset(Stream(6), comm, shuffle=True)  # noqa: E731
    assert_refused(comm, call, "Stream", "shuffle=False", kind=torchmn.ArgumentError)


@ranks(2, on="threads")
def test_regions_of_a_stream_are_refused_with_the_way_out(comm):
    grid = torchmn.ProcessGrid(comm, width=2)
    call = lambda: scatter_regions(Stream(6), grid)  # noqa: E731
    assert_refused(comm, call, "Stream", "create_multi_node_iterator", kind=torchmn.ArgumentError)
