"""Ranks that select different items of a data set raise before items are sent."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

import torchmn
from tests._worlds import ranks
from torchmn.data import scatter_dataset, scatter_regions
from torchmn.data.same_data import selection
from torchmn.errors import MismatchError

WHOLE = list(range(20))


def split(seed):
    return random_split(WHOLE, [12, 8], generator=torch.Generator().manual_seed(seed))[0]


@ranks(3, on=("threads", "mpi"))
def test_random_splits_of_other_seeds_are_refused_on_all_ranks(comm):
    with pytest.raises(MismatchError, match=r"other items or in another order.*random_split the same generator"):
        scatter_dataset(split(comm.rank), comm)
    with pytest.raises(MismatchError, match="other items or in another order"):
        scatter_dataset(ConcatDataset([WHOLE, split(comm.rank)]), comm)
    parts = comm.allgather_obj(list(scatter_dataset(split(1), comm, force_equal_length=False)))
    assert [item for part in parts for item in part] == list(split(1))


@ranks(2, on="threads")
def test_a_part_is_not_scattered_once_more(comm):
    part = scatter_dataset(WHOLE, comm)
    with pytest.raises(MismatchError, match="scattered before"):
        scatter_dataset(part, comm)
    with pytest.raises(MismatchError, match="scattered before"):
        scatter_dataset(Subset(part, range(10)), comm)
    assert len(scatter_dataset(part if comm.rank == 0 else None, comm)) == 5  # 5 of the items of rank 0's part


@ranks(4, on="threads")
def test_a_part_may_be_scattered_between_ranks_that_have_the_same(comm):
    pairs, within = comm.split(comm.rank % 2), comm.split(comm.rank // 2)
    part = scatter_dataset(scatter_dataset(WHOLE, pairs), within)
    assert sorted(item for mine in comm.allgather_obj(list(part)) for item in mine) == WHOLE


@ranks(2, on="threads")
def test_tiles_of_random_splits_of_other_seeds_are_refused(comm):
    images = TensorDataset(torch.arange(128.0).view(8, 1, 4, 4), torch.arange(8))

    def some(seed):
        return random_split(images, [6, 2], generator=torch.Generator().manual_seed(seed))[0]

    grid = torchmn.ProcessGrid(comm, height=2)
    with pytest.raises(MismatchError, match="random_split"):
        scatter_regions(some(comm.rank), grid)
    assert len(next(iter(DataLoader(scatter_regions(some(0), grid), 6)))[1]) == 6


def test_only_subsets_have_a_selection_digest():
    assert selection(WHOLE) is None and selection(ConcatDataset([WHOLE, WHOLE])) is None
    assert selection(Subset(WHOLE, [1, 2])) == selection(Subset(WHOLE, (1, 2))) != selection(Subset(WHOLE, [2, 1]))
    assert selection(Subset(Subset(WHOLE, [1, 2]), [0])) != selection(Subset(Subset(WHOLE, [3, 2]), [0]))

    class Indexed(list):
        indices = "no numbers"

    assert selection(Indexed(WHOLE)) is None
