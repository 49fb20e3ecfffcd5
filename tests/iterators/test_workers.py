"""Loaders with worker processes, in processes that hold MPI or gloo."""

import traceback

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_still_works
from tests.data.worlds import ACROSS
from torchmn.data import scatter_dataset
from torchmn.iterators import create_multi_node_iterator, create_synchronized_iterator

# Not with threads: forking a process while other ranks run in its threads may deadlock.
PROCESSES = (*ACROSS, "openmpi")


class Noise(Dataset):
    """Items with a random number that depends on the worker's seed only."""

    def __init__(self, length, gap=None):
        self.length, self.gap = length, gap

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.gap:
            raise OSError(f"item {index} cannot be read")
        return index, torch.rand(())


def epoch_of(batches) -> list:
    return [(indices.tolist(), noise.tolist()) for indices, noise in batches]


@ranks(1, on="solo")
@ranks(3, on=PROCESSES)
def test_a_master_with_worker_processes_serves_every_rank(comm):
    for persistent in (False, True):
        loader = DataLoader(Noise(11), batch_size=2, shuffle=True, num_workers=2, persistent_workers=persistent)
        iterator = create_multi_node_iterator(loader if comm.rank == 0 else None, comm)
        for _epoch in range(2):
            epoch = epoch_of(iterator)
            assert sorted(index for indices, _ in epoch for index in indices) == list(range(11))
            assert comm.allgather_obj(epoch) == [epoch] * comm.size
        del loader, iterator
    assert_still_works(comm)


@ranks(1, on="solo")
@ranks(3, on=ACROSS)
def test_an_error_in_a_worker_of_the_master_is_raised_on_every_rank(comm):
    loader = DataLoader(Noise(11, gap=4), batch_size=2, num_workers=2)
    iterator = create_multi_node_iterator(loader if comm.rank == 0 else None, comm)
    with pytest.raises(OSError if comm.rank == 0 else torchmn.PeerError, match="item 4 cannot be read") as caught:
        list(iterator)
    # The error and the frames of its traceback hold each other, and torch's iterator with them. As garbage it would
    # wait 5 s for each of its workers, in a later test; let go here, it ends them at once.
    traceback.clear_frames(caught.tb)
    assert iterator.position == 2
    assert_still_works(comm)


@ranks(1, on="solo")
@ranks(3, on=ACROSS)
def test_workers_draw_the_same_random_numbers_on_every_rank_and_after_resuming(comm):
    def fresh(persistent):
        loader = DataLoader(Noise(9), batch_size=2, shuffle=True, num_workers=1, persistent_workers=persistent)
        return create_synchronized_iterator(loader, comm)

    for persistent in (False, True):
        iterator = fresh(persistent)
        first = epoch_of(iterator)
        assert comm.allgather_obj(first) == [first] * comm.size
        epoch = iter(iterator)
        _first, _second = next(epoch), next(epoch)
        state = iterator.state_dict()
        rest, following = epoch_of(epoch), epoch_of(iterator)
        resumed = fresh(persistent)
        resumed.load_state_dict(state)
        order = [[indices for indices, _ in part] for part in (epoch_of(resumed), epoch_of(resumed))]
        assert order == [[indices for indices, _ in part] for part in (rest, following)]
        if not persistent:
            resumed.load_state_dict(state)
            epoch_of(resumed)
            assert epoch_of(resumed) == following, "workers of later epochs have the same seeds, too"


@ranks(3, on=ACROSS)
def test_workers_read_a_part_that_was_sent(comm):
    part = scatter_dataset(
        [(index, torch.full((3,), float(index))) for index in range(9)] if comm.rank == 0 else None, comm
    )
    batches = list(DataLoader(part, batch_size=2, num_workers=2))
    assert torch.cat([indices for indices, _ in batches]).tolist() == part.indices.tolist()
    assert torch.cat([rows for _, rows in batches]).tolist() == [[float(index)] * 3 for index in part.indices]
