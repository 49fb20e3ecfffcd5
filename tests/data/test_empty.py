"""Data sets of empty tuples."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from tests._worlds import ranks
from torchmn.data import create_empty_dataset, scatter_dataset


@pytest.mark.parametrize("length", [0, 1, 7])
def test_an_empty_dataset_is_as_long_as_the_other_and_has_empty_tuples(length):
    empty = create_empty_dataset(TensorDataset(torch.zeros(length, 2)))
    assert len(empty) == length
    assert list(empty) == empty[:] == [()] * length
    assert empty[1:] == empty[-length:][1:] == [()] * max(0, length - 1)
    with pytest.raises(IndexError):
        empty[length]


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}])
def test_its_batches_call_the_model_with_no_arguments_as_often_as_full_ones(options):
    full = TensorDataset(torch.zeros(7, 2))
    calls = [(lambda *arguments: arguments)(*batch) for batch in DataLoader(create_empty_dataset(full), **options)]
    assert calls == [()] * len(DataLoader(full, **options))


def test_a_shuffling_loader_works_too():
    assert list(DataLoader(create_empty_dataset(range(5)), batch_size=2, shuffle=True)) == [[], [], []]


def test_a_dataset_without_a_length_is_refused():
    with pytest.raises(torchmn.ArgumentError, match="length"):
        create_empty_dataset(iter([1]))


@ranks(1, 3, on="threads")
def test_a_rank_without_data_takes_as_many_steps_as_one_with_data(comm):
    part = scatter_dataset(list(range(10)), comm)
    assert len(list(DataLoader(create_empty_dataset(part), 2))) == len(list(DataLoader(part, 2)))
