"""The master's batches on every rank."""

from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import torchmn
from tests._worlds import ranks
from tests._worlds.data import (
    EVERY_DTYPE,
    SHAPES,
    assert_refused,
    assert_same,
    assert_still_works,
    bits,
    roots,
)
from tests.data.worlds import small_worlds, small_worlds_of_several
from torchmn.iterators import create_multi_node_iterator, create_synchronized_iterator, multi_node

Pair = namedtuple("Pair", "image label")


def batches_of_many_kinds() -> list:
    """Batches of several structures, as custom collate functions make them."""
    return [
        torch.tensor([2**24 + 1, 2**53 + 1, -(2**62) - 1]),
        [torch.arange(3.0), torch.tensor([1, 2, 3])],
        Pair(bits((2, 3), torch.float64, 1), ["cat", "dog"]),
        {"x": (bits((2,), torch.bfloat16, 2), None), "ids": [2**70, 1.5, True], "deep": {1: [torch.tensor(True)]}},
        "text",
        (),
        None,
        [bits(shape, dtype, number) for number, dtype in enumerate(EVERY_DTYPE) for shape in SHAPES],
        {"large": bits((multi_node.LARGE_BYTES // 4 + 3,), torch.float32, 3), "small": torch.tensor(7)},
        [bits((1100, 1000), torch.uint8, 4).t(), bits((1100, 1000), torch.bool, 5), torch.zeros(0)],
    ]


def assert_alike(got, expected, where="batch") -> None:
    """Fails unless two batches have the same structure, types and bits."""
    assert type(got) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert_same(got, expected, where)
    elif isinstance(expected, dict):
        assert list(got) == list(expected), where
        for key in expected:
            assert_alike(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), where
        for place, (one, other) in enumerate(zip(got, expected, strict=True)):
            assert_alike(one, other, f"{where}[{place}]")
    else:
        assert got == expected, where


@small_worlds
@ranks(4, on="mpi")
@ranks(3, on="openmpi")
def test_every_rank_gets_the_masters_batches_whatever_they_are(comm):
    for master in roots(comm):
        loader = batches_of_many_kinds() if comm.rank == master else None
        iterator = create_multi_node_iterator(loader, comm, master)
        assert len(iterator) == len(batches_of_many_kinds())
        for _epoch in range(2):
            for number, expected in enumerate(batches_of_many_kinds()):
                if number == 0:
                    epoch = iter(iterator)
                assert_alike(next(epoch), expected, f"batch {number}")
            with pytest.raises(StopIteration):
                next(epoch)
        assert (iterator.epoch, iterator.position) == (2, 0)


@small_worlds_of_several
def test_batches_of_the_same_layout_are_those_of_the_master_before_and_after_another_layout(comm):
    x, y = torch.arange(24.0).view(4, 6), torch.arange(4)
    kinds = [[x, y], [x + 1, y + 1], [x[:3] + 2, y[:3]], [x[:3], y[:3] + 2], (x, y), (x.t().reshape(6, 4).t(), y)]
    kinds += [{"x": x, "y": y}, {"x": x + 1, "y": y}, {"y": y, "x": x}, [x.double(), y], [x.double() + 1, y], None]
    kinds += [[x, y], "text", [x + 5, y]]
    batches = create_multi_node_iterator(kinds if comm.rank == 0 else None, comm)
    for _ in range(2):
        found = list(batches)
        assert len(found) == len(kinds)
        for number, (got, expected) in enumerate(zip(found, kinds, strict=True)):
            assert_alike(got, expected, f"batch {number}")


@ranks(2, on="threads")
def test_a_batch_with_the_layout_of_the_last_one_is_not_pickled(comm, monkeypatch):
    def refuse(*_):
        raise AssertionError("the batch was pickled")

    batches = create_multi_node_iterator([[torch.ones(3)] * 2] * 3 if comm.rank == 0 else None, comm)
    epoch = iter(batches)
    next(epoch)
    comm.barrier()
    monkeypatch.setattr(multi_node, "pack", refuse)
    assert [x.tolist() for x in next(epoch)] == [[1.0] * 3] * 2
    comm.barrier()
    monkeypatch.undo()
    assert len(list(epoch)) == 1


@small_worlds
def test_a_shuffling_loader_gives_all_ranks_the_same_new_order_each_epoch(comm):
    master = comm.size - 1
    ids = 2**40 + torch.arange(11)
    loader = DataLoader(TensorDataset(ids, ids.double() / 3), batch_size=4, shuffle=True)
    # The loaders of other ranks are ignored.
    iterator = create_multi_node_iterator(loader if comm.rank == master else range(1000), comm, master)
    assert len(iterator) == 3
    epochs = []
    for _epoch in range(3):
        batches = list(iterator)
        assert [len(x) for x, _ in batches] == [4, 4, 3]
        for x, y in batches:
            assert_same(y, x.double() / 3)
        epochs.append(torch.cat([x for x, _ in batches]).tolist())
        assert sorted(epochs[-1]) == ids.tolist()
    assert comm.allgather_obj(epochs) == [epochs] * comm.size
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]


@ranks(1, 2, 3, on="threads")
def test_an_epoch_that_is_left_early_is_over(comm):
    iterator = create_multi_node_iterator([10, 20, 30] if comm.rank == 0 else None, comm)
    for batch in iterator:
        if batch == 20:
            break
    assert (iterator.epoch, iterator.position) == (0, 2)
    assert list(iterator) == [10, 20, 30]
    assert (iterator.epoch, iterator.position) == (2, 0)


@ranks(1, 2, 3, on="threads")
def test_a_loader_without_a_length_works_but_for_its_length(comm):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    iterator = create_multi_node_iterator(DataLoader(Stream(), batch_size=2), comm)
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4]]
    with pytest.raises(TypeError, match="length"):
        len(iterator)
    assert list(create_multi_node_iterator([], comm)) == []


@ranks(2, 3, on="threads")
def test_each_rank_owns_its_batch(comm):
    (batch,) = create_multi_node_iterator([torch.zeros(3), torch.zeros(10)][:1], comm)
    comm.barrier()
    batch += comm.rank
    comm.barrier()
    assert batch.tolist() == [comm.rank] * 3


@small_worlds
def test_an_error_in_the_masters_loader_is_raised_on_every_rank(comm):
    def loader():
        yield torch.zeros(2)
        raise FileNotFoundError("picture 17 is gone")

    master = comm.size - 1
    epoch = iter(create_multi_node_iterator(loader() if comm.rank == master else None, comm, master))
    assert_same(next(epoch), torch.zeros(2))
    with pytest.raises(FileNotFoundError if comm.rank == master else torchmn.PeerError, match="picture 17") as caught:
        next(epoch)
    if comm.rank != master:
        assert f"rank {master}" in str(caught.value) and "FileNotFoundError" in str(caught.value)
        assert "test_multi_node.py" in str(caught.value), "with the line it came from"
    assert_still_works(comm)


@ranks(1, on="threads")
def test_on_one_rank_batches_need_not_pickle(comm):
    batch = {"f": lambda: None}
    assert list(create_multi_node_iterator([batch, None], comm)) == [batch, None]


@small_worlds_of_several
def test_a_batch_that_does_not_pickle_is_an_error_on_every_rank(comm):
    epoch = iter(create_multi_node_iterator([{"f": lambda: None}], comm))
    with pytest.raises(torchmn.ArgumentError if comm.rank == 0 else torchmn.PeerError) as caught:
        next(epoch)
    for word in ("rank 0", "batch 0", "dict", "lambda"):
        assert word in str(caught.value)
    assert_still_works(comm)


@small_worlds
def test_wrong_arguments_are_refused_on_every_rank(comm):
    kind = torchmn.ArgumentError
    assert_refused(comm, lambda: create_multi_node_iterator(5, comm), "rank 0", "iterable", "5", kind=kind)
    assert_refused(comm, lambda: create_multi_node_iterator(None, comm), "rank 0", "None", kind=kind)
    assert_refused(comm, lambda: create_multi_node_iterator([1], comm, comm.size), "rank_master", kind=kind)
    if comm.size > 1:
        call = lambda: create_multi_node_iterator([1], comm, comm.rank)  # noqa: E731
        assert_refused(comm, call, "rank_master", kind=torchmn.MismatchError)


@small_worlds_of_several
def test_ranks_that_take_different_steps_raise(comm):
    iterator = create_multi_node_iterator([1, 2, 3], comm)
    epoch = iter(iterator)
    assert next(epoch) == 1
    if comm.rank == 0:
        epoch = iter(iterator)  # one rank starts again, the others continue
    assert_refused(comm, lambda: next(epoch), "epoch", "batch", kind=torchmn.MismatchError)


@small_worlds
def test_state_of_a_resumable_loader_is_saved_and_restored_on_every_rank(comm):
    master = comm.size - 1

    alone = comm.split(comm.rank)
    assert alone is not None

    def fresh(seed):
        loader = DataLoader(range(20), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(seed))
        resumable = create_synchronized_iterator(loader, alone)
        return create_multi_node_iterator(resumable if comm.rank == master else None, comm, master)

    iterator = fresh(1)
    list(iterator)
    epoch = iter(iterator)
    _first, _second = next(epoch), next(epoch)
    state = iterator.state_dict()
    states = comm.allgather_obj({key: str(value) for key, value in state.items()})
    assert states == [states[0]] * comm.size, "a checkpoint stores it once"
    rest = [batch.tolist() for batch in epoch]
    following = [batch.tolist() for batch in iterator]

    resumed = fresh(2)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.position) == (1, 2)
    assert [batch.tolist() for batch in resumed] == rest
    assert [batch.tolist() for batch in resumed] == following
    assert (resumed.epoch, resumed.position) == (3, 0)


@ranks(1, 2, on="threads")
def test_a_loader_that_cannot_be_resumed_raises_on_every_rank(comm):
    iterator = create_multi_node_iterator(DataLoader(range(4)), comm)
    words = ("state_dict", "DataLoader", "create_synchronized_iterator")
    assert_refused(comm, iterator.state_dict, *words, kind=torchmn.ArgumentError)
    state = {"epoch": 0, "position": 0, "loader": {}}
    assert_refused(comm, lambda: iterator.load_state_dict(state), *words, kind=torchmn.ArgumentError)
