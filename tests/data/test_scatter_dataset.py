"""Each rank gets its part of a data set, and only that."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchmn
from tests._worlds import ranks
from tests._worlds.data import EVERY_DTYPE, assert_refused, assert_same, assert_still_works, bits, roots
from tests.data.worlds import ACROSS, small_worlds, small_worlds_of_several
from torchmn.data import scatter_dataset, scatter_items
from torchmn.data.partition import IndexRange, permutation
from torchmn.data.same_data import compared_indices
from torchmn.datasets import ImageSet


class Squares(Dataset):
    """A map-style data set that counts how often it is read."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return torch.tensor([index]), {"square": index**2, "name": f"item {index}"}


def lengths(comm) -> list[int]:
    """Returns lengths that are corner cases of a partition."""
    return sorted({0, 1, 2, comm.size - 1, comm.size, 5 * comm.size - 1, 5 * comm.size + 1})


def expected_indices(total, comm, equal, seed=None) -> list[int]:
    return permutation(total, seed)[IndexRange.of(total, comm.size, comm.rank, equal).indices()].tolist()


@small_worlds
@ranks(4, on="mpi")
@ranks(3, on="openmpi")
def test_every_item_is_on_a_rank_and_parts_are_equal_or_exact(comm):
    for total in lengths(comm):
        items = [f"item {index}" for index in range(total)]
        for root in roots(comm):
            for equal in (True, False):
                given = items if comm.rank == root else None
                part = scatter_dataset(given, comm, root, force_equal_length=equal)
                assert part.indices.tolist() == expected_indices(total, comm, equal)
                assert list(part) == [items[index] for index in part.indices]
                assert part.global_length == total
                everyone = comm.allgather_obj((list(part), list(part.unique()), part.unique_length))
                own = [item for _, unique, _ in everyone for item in unique]
                assert sorted(own) == sorted(items), "each item is unrepeated on one rank"
                assert sum(length for _, _, length in everyone) == total
                counts = [len(items_there) for items_there, _, _ in everyone]
                assert max(counts) - min(counts) <= (0 if equal else 1)
                assert 0 <= sum(counts) - total <= (comm.size - 1 if equal else 0)


@small_worlds
def test_ranks_that_have_the_dataset_read_only_their_items_from_it(comm):
    for total in lengths(comm):
        dataset = Squares(total)
        part = scatter_dataset(dataset, comm, shuffle=True, seed=7)
        assert set(dataset.read) <= set(compared_indices(total)), "only the items that ranks compare"
        dataset.read.clear()
        assert [int(x) for x, _ in part] == part.indices.tolist() == expected_indices(total, comm, True, seed=7)
        assert sorted(dataset.read) == sorted(part.indices.tolist())


@small_worlds_of_several
def test_ranks_without_a_data_set_receive_only_their_items(comm):
    root = comm.size - 1
    for total in lengths(comm):
        dataset = Squares(total) if comm.rank == root else None
        part = scatter_dataset(dataset, comm, root, shuffle=True, seed=7)
        assert part.source is not dataset and len(part.source) == len(part)
        for index, (x, rest) in zip(part.indices.tolist(), part, strict=True):
            assert_same(x, torch.tensor([index]))
            assert rest == {"square": index**2, "name": f"item {index}"}
        if dataset is not None:
            assert set(dataset.read) == set(range(total))


@ranks(3, 4, on="threads")
def test_if_some_ranks_have_the_data_set_only_the_others_receive_items(comm):
    dataset = Squares(11) if comm.rank in (0, 2) else None
    part = scatter_dataset(dataset, comm)
    assert [rest["square"] for _, rest in part] == [index**2 for index in part.indices.tolist()]
    assert part.indices.tolist() == expected_indices(11, comm, True)
    assert (part.source is dataset) == (comm.rank == 2), "root keeps a copy, so that the whole can be freed"


@small_worlds
def test_tables_are_sent_as_tensors_of_the_same_kind(comm):
    root = comm.size - 1
    for dtype in EVERY_DTYPE:
        x = bits((7, 3), dtype, 5)
        part = scatter_dataset(x if comm.rank == root else None, comm, root, shuffle=True, seed=1)
        assert isinstance(part.source, torch.Tensor)
        for place, index in enumerate(part.indices):
            assert_same(part[place], x[index], dtype)
    ids, images = 2**60 + torch.arange(7), bits((7, 1, 2, 2), torch.float32, 6)
    pairs = scatter_dataset(TensorDataset(ids, images) if comm.rank == root else None, comm, root)
    digits = scatter_dataset(ImageSet("digits", images, ids) if comm.rank == root else None, comm, root)
    arrays = scatter_dataset(ids.numpy()[:, None] if comm.rank == root else None, comm, root)
    assert isinstance(pairs.source, TensorDataset) and isinstance(digits.source, ImageSet)
    assert digits.source.name == "digits"
    for place, index in enumerate(pairs.indices):
        assert_same(pairs[place][0], ids[index])
        assert_same(pairs[place][1], images[index])
        assert_same(digits[place][0], images[index])
        assert digits[place][1] == int(ids[index])
        assert isinstance(arrays[place], np.ndarray) and arrays[place].tolist() == [int(ids[index])]


@ranks(2, 3, on="threads")
def test_what_only_looks_like_a_table_is_sent_item_by_item(comm):
    class Negated(TensorDataset):
        def __getitem__(self, index):
            return tuple(-x for x in super().__getitem__(index))

    x = torch.arange(1, 8)
    words = np.array(["one", "two", "three"])
    backwards = x.numpy()[::-1]
    part = scatter_dataset(Negated(x) if comm.rank == 0 else None, comm)
    assert [int(item[0]) for item in part] == [-int(x[index]) for index in part.indices]
    part = scatter_dataset(words if comm.rank == 0 else None, comm)
    assert [str(item) for item in part] == [str(words[index]) for index in part.indices]
    part = scatter_dataset(backwards if comm.rank == 0 else None, comm)
    assert [int(item) for item in part] == [int(backwards[index]) for index in part.indices]


@small_worlds_of_several
def test_large_data_sets_are_sent_in_bounded_rounds(comm):
    sizes: list[int] = []
    scatter = comm.scatter

    def measured(xs, root=0):
        if xs is not None:
            sizes.append(sum(x.nbytes for x in xs))
        return scatter(xs, root)

    comm.scatter = measured
    item_bytes, total = 1 << 20, 101
    rows = torch.arange(total).repeat_interleave(item_bytes // 8).view(total, -1)
    for whole in (rows, list(rows)):
        part = scatter_dataset(whole if comm.rank == 0 else None, comm, force_equal_length=False)
        for place, index in enumerate(part.indices.tolist()):
            assert_same(part[place], rows[index])
            assert part[place].nbytes == item_bytes
    if comm.rank == 0:
        assert sum(sizes) >= 2 * rows.nbytes, "both data sets were sent by this transport"
        assert max(sizes) <= scatter_items.ROUND_BYTES + comm.size * item_bytes


@small_worlds
def test_a_shuffle_follows_from_its_seed_at_any_number_of_ranks(comm):
    def dealt(**options):
        parts = comm.allgather_obj(scatter_dataset(range(23), comm, force_equal_length=False, **options).indices)
        return torch.cat(parts).tolist()

    assert dealt() == dealt(seed=5) == list(range(23))
    assert dealt(shuffle=True, seed=5) == dealt(shuffle=True, seed=np.int64(5)) == permutation(23, 5).tolist()
    assert dealt(shuffle=True, seed=5) != dealt(shuffle=True, seed=6)
    drawn, again = dealt(shuffle=True), dealt(shuffle=True)
    assert sorted(drawn) == sorted(again) == list(range(23))
    assert len({tuple(drawn), tuple(again), tuple(range(23))}) == 3, "each call draws an order"


@ranks(3, on=ACROSS)
def test_without_a_seed_the_order_follows_from_roots_random_state(comm):
    def drawn(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed + comm.rank)
            parts = [scatter_dataset(range(51), comm, root=1, shuffle=True).indices for _ in range(2)]
        return [torch.cat(comm.allgather_obj(indices)).tolist() for indices in parts]

    first, again, other = drawn(1), drawn(1), drawn(2)
    assert sorted(first[0]) == list(range(51))
    assert first == again != other and first[0] != first[1]


@ranks(3, on=ACROSS)
def test_a_drawn_order_keeps_equal_random_states_equal(comm):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        scatter_dataset(range(51) if comm.rank == 0 else None, comm, shuffle=True)
        following = comm.allgather(torch.rand(3))
    assert torch.equal(following[0], following[1]) and torch.equal(following[0], following[2])


@small_worlds
def test_a_loader_over_the_part_gives_its_items_in_batches(comm):
    x = torch.arange(10.0).view(10, 1)
    whole = TensorDataset(x, x + 0.5)
    for given in (whole, whole if comm.rank == 0 else None):
        part = scatter_dataset(given, comm)
        batches = list(DataLoader(part, batch_size=3))
        assert torch.cat([first for first, _ in batches]).view(-1).tolist() == part.indices.tolist()
        assert torch.cat([second for _, second in batches]).view(-1).tolist() == (part.indices + 0.5).tolist()
        if len(part):
            assert part[-1][0].item() == part.indices[-1]
        assert [first.item() for first, _ in part[1:-1]] == part.indices[1:-1].tolist()
        with pytest.raises(IndexError):
            part[len(part)]


@small_worlds_of_several
def test_an_item_that_does_not_pickle_is_named_on_every_rank(comm):
    for bad in range(9):
        items = [(index, "fine") for index in range(9)]
        items[bad] = (bad, lambda: None)
        given = items if comm.rank == 0 else None
        call = lambda given=given: scatter_dataset(given, comm)  # noqa: E731
        assert_refused(
            comm, call, "rank 0", "scatter_dataset", f"item {bad}", "tuple", "lambda", kind=torchmn.ArgumentError
        )


@small_worlds_of_several
def test_an_item_that_cannot_be_read_is_an_error_on_every_rank(comm):
    class Gap(Squares):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError("no such file")
            return super().__getitem__(index)

    given = Gap(9) if comm.rank == 0 else None
    call = lambda: scatter_dataset(given, comm)  # noqa: E731
    assert_refused(comm, call, "rank 0", "dataset[5]", "KeyError", "no such file", kind=torchmn.ArgumentError)


@small_worlds
def test_wrong_arguments_are_refused_on_every_rank(comm):
    culprit = comm.size - 1

    def wrong(**changed):
        arguments = {"dataset": [1, 2, 3], "root": 0, "seed": None, **(changed if comm.rank == culprit else {})}
        return lambda: scatter_dataset(arguments.pop("dataset"), comm, **arguments)

    for changed, word in (
        ({"root": comm.size}, "root"),
        ({"root": "0"}, "root"),
        ({"seed": "x"}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"dataset": 5}, "int"),
        ({"dataset": torch.tensor(1.0)}, "length"),
    ):
        assert_refused(comm, wrong(**changed), f"rank {culprit}", word, kind=torchmn.ArgumentError)
    assert_refused(comm, lambda: scatter_dataset(None, comm, culprit), "root", "None", kind=torchmn.ArgumentError)


@small_worlds_of_several
def test_ranks_with_different_arguments_raise(comm):
    last = comm.rank == comm.size - 1
    for call, words in (
        (lambda: scatter_dataset(range(5 + last), comm), ("5 items", "6 items")),
        (lambda: scatter_dataset(range(5), comm, shuffle=last), ("shuffle",)),
        (lambda: scatter_dataset(range(5), comm, shuffle=True, seed=int(last)), ("seed",)),
        (lambda: scatter_dataset(range(5), comm, force_equal_length=last), ("force_equal_length",)),
        (lambda: scatter_dataset(range(5), comm, root=int(last)), ("root",)),
    ):
        assert_refused(comm, call, *words, kind=torchmn.MismatchError)
    assert_still_works(comm)
