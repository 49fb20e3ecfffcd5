"""Data sets that differ between ranks, in items or order, raise on all ranks before items are sent."""

import random
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from tests.data.worlds import small_worlds, small_worlds_of_several
from torchmn.data import scatter_dataset, scatter_regions
from torchmn.data.digest import digest
from torchmn.data.same_data import COMPARED, compared_indices
from torchmn.errors import MismatchError

NAMES = [f"picture {number}.png" for number in range(20)]


class Made(Dataset):
    """A data set whose items a function makes."""

    def __init__(self, length, make):
        self.length, self.make = length, make

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.make(index)


def shuffled(items, seed):
    return random.Random(seed).sample(items, len(items))


@small_worlds_of_several
def test_names_in_another_order_on_each_rank_are_refused(comm):
    mine = shuffled(NAMES, comm.rank)
    words = ("20", "in another order", "rank 0: 'picture", "pass None on all ranks but the root", "compare_items=False")
    assert_refused(comm, lambda: scatter_dataset(mine, comm), *words, kind=MismatchError)
    part = scatter_dataset(mine if comm.rank == 0 else None, comm, force_equal_length=False)
    assert [item for items in comm.allgather_obj(list(part)) for item in items] == shuffled(NAMES, 0)
    part = scatter_dataset(sorted(mine), comm, force_equal_length=False)
    assert [item for items in comm.allgather_obj(list(part)) for item in items] == sorted(NAMES)


@ranks(2, on="threads")
def test_two_swapped_names_are_detected(comm):
    names = [str(number) for number in range(1000)]
    here = next(number for number in range(999) if not {number, number + 1} & set(compared_indices(1000)))
    if comm.rank == 1:
        names[here], names[here + 1] = names[here + 1], names[here]
    assert_refused(comm, lambda: scatter_dataset(names, comm), "All items", kind=MismatchError)


@ranks(3, on=("threads", "mpi"))
def test_every_kind_of_data_set_in_another_order_is_refused(comm):
    order = torch.tensor(shuffled(range(20), comm.rank))
    table = torch.arange(60.0).view(20, 3)
    for given in (
        table[order],
        table[order].numpy(),
        TensorDataset(table[order], order),
        Made(20, lambda index: {"image": table[order[index]], "name": NAMES[order[index]]}),
        [(row, 1) for row in table[order]],
    ):
        assert_refused(comm, lambda given=given: scatter_dataset(given, comm), "in another order", kind=MismatchError)


@small_worlds
def test_equal_items_of_any_type_are_accepted(comm):
    @dataclass
    class Sample:
        image: np.ndarray
        tags: set

    for make in (
        lambda index: torch.full((2, 3), float(index)),
        lambda index: {"x": np.arange(index), "y": {"a", "b", f"{index}"}, "z": (None, 1.5, b"\x00\xff")},
        lambda index: dict([("b", index), ("a", 1)][:: 1 if comm.rank % 2 else -1]),
        lambda index: Sample(np.eye(3) * index, {str(index), "x"}),
        lambda index: Image.new("RGB", (4, 3), (index, 0, 255)),
        lambda index: (threading.Lock(), lambda: comm.rank, index),
        lambda index: torch.eye(3).to_sparse() * index,
        lambda index: float("nan"),
    ):
        part = scatter_dataset(Made(11, make), comm)
        assert isinstance(part.source, Made) and part.global_length == 11


def test_digests_differ_for_different_items_but_not_for_the_order_of_sets():
    different = [
        1, 1.0, True, "1", b"1", None, (1,), [1], {1: 1}, {1}, np.int64(1), np.float32(1), torch.tensor(1),
        torch.tensor([1]), torch.tensor(1.0), np.array([1]), Path("1"), Image.new("L", (1, 1), 1),
        Image.new("L", (1, 1), 2), {"a": torch.zeros(2)}, {"a": torch.ones(2)}, np.array([1, "1"], dtype=object),
    ]  # fmt: skip
    assert len({digest(item) for item in different}) == len(different)
    letters, backwards = set(), set()
    for code in range(97, 123):
        letters.add(chr(code))
        backwards.add(chr(219 - code))
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1})
    assert digest(letters) == digest(backwards)
    assert digest(lambda: 1) == digest(lambda: 2), "functions are compared by type only"
    itself: list = [1]
    itself.append(itself)
    other: list = [1]
    other.append(other)
    assert digest(itself) == digest(other)


@small_worlds_of_several
def test_random_augmentation_is_read_under_one_seed_and_random_states_stay(comm):
    def augmented(index):
        return torch.rand(3) + index, np.random.rand(2), random.random(), index

    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    part = scatter_dataset(Made(30, augmented), comm)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1] and random.getstate() == states[2]
    comm.barrier()  # ranks that are threads share the generators
    assert [item[3] for item in part] == part.indices.tolist()


class OwnNumbers(Dataset):
    """Draws from a private generator, with another seed on each rank."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __len__(self):
        return 9

    def __getitem__(self, index):
        if not 0 <= index < 9:
            raise IndexError(index)
        return self.generator.random(), index


@small_worlds_of_several
def test_equal_data_sets_with_different_items_need_compare_items_false(comm):
    data = OwnNumbers(comm.rank)
    assert_refused(comm, lambda: scatter_dataset(data, comm), "compare_items=False", kind=MismatchError)
    assert_refused(comm, lambda: scatter_dataset(data, comm, compare_items=comm.rank == 0), "compare_items")
    part = scatter_dataset(data, comm, compare_items=False)
    first = part[0]
    assert first == (np.random.default_rng(comm.rank).random(), part.indices[0]), "its generator did not advance"


@ranks(2, on="threads")
def test_a_file_that_the_first_read_opens_is_not_opened_by_the_comparison(comm):
    class Opened(Dataset):
        file = None

        def __len__(self):
            return 20

        def __getitem__(self, index):
            self.file = self.file or object()
            return index

    data = Opened()
    scatter_dataset(Subset(data, range(20)), comm)
    assert data.file is None, "worker processes would share it"


@small_worlds_of_several
def test_ranks_with_an_empty_data_set_receive_the_items_of_root(comm):
    root = comm.size - 1
    for nothing in ([], None, torch.zeros(0, 3), Made(0, int)):
        part = scatter_dataset(NAMES if comm.rank == root else nothing, comm, root, force_equal_length=False)
        assert [item for items in comm.allgather_obj(list(part)) for item in items] == NAMES


@ranks(3, on="threads")
def test_if_some_ranks_have_the_data_set_those_are_compared(comm):
    mine = {0: NAMES, 1: None, 2: NAMES[::-1]}[comm.rank]
    assert_refused(comm, lambda: scatter_dataset(mine, comm), "rank 2: 'picture 19.png'", kind=MismatchError)


@ranks(2, on="threads")
def test_an_item_that_cannot_be_read_is_a_difference_only_if_others_can_read_it(comm):
    def broken(index):
        raise OSError("no such file")

    assert len(scatter_dataset(Made(4, broken), comm)) == 2
    mine = Made(4, broken if comm.rank == 1 else int)
    words = "rank 1: dataset[0] raised OSError: no such file"
    assert_refused(comm, lambda: scatter_dataset(mine, comm), words, kind=MismatchError)


def test_the_items_that_are_compared_are_the_ends_and_some_between():
    assert (
        compared_indices(0) == []
        and compared_indices(5) == [0, 1, 2, 3, 4]
        and len(compared_indices(COMPARED)) == COMPARED
    )
    for length in (9, 10, 1000, 10**9):
        chosen = compared_indices(length)
        assert chosen == sorted(set(chosen)) and len(chosen) == COMPARED
        assert chosen[0] == 0 and chosen[-1] == length - 1 and chosen == compared_indices(length)


@ranks(2, on=("threads", "mpi"))
def test_tiles_of_images_in_another_order_are_refused(comm):
    grid = torchmn.ProcessGrid(comm, height=2)
    order = torch.tensor(shuffled(range(12), comm.rank))
    images = torch.arange(12 * 16.0).view(12, 1, 4, 4)[order]
    items = [(image, 1) for image in images]
    for given in (images, (images, order), TensorDataset(images, order), items):
        call = lambda given=given: scatter_regions(given, grid)  # noqa: E731
        assert_refused(comm, call, "scatter_regions", "in another order", kind=MismatchError)
        assert len(scatter_regions(given, grid, compare_items=False)) == 12
