"""`next(iterator)`: batches over the ends of epochs, and where in an epoch the iterator is."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests._worlds import ranks
from torchmn.iterators import create_multi_node_iterator, create_synchronized_iterator


def made(kind: str, comm, loader):
    if kind == "synchronized":
        return create_synchronized_iterator(loader, comm)
    return create_multi_node_iterator(loader if comm.rank == 0 else None, comm)


@ranks(1, 2, 3, on="threads")
@pytest.mark.parametrize("kind", ["multi-node", "synchronized"])
def test_next_goes_through_the_epochs(comm, kind):
    iterator = made(kind, comm, DataLoader(torch.arange(5), batch_size=2))
    seen = []
    for _ in range(7):
        batch = iterator.next() if len(seen) % 2 else next(iterator)
        seen.append((batch.tolist(), iterator.epoch, iterator.is_new_epoch, round(iterator.epoch_detail, 2)))
    first = [([0, 1], 0, False, 0.33), ([2, 3], 0, False, 0.67), ([4], 1, True, 1.0)]
    second = [([0, 1], 1, False, 1.33), ([2, 3], 1, False, 1.67), ([4], 2, True, 2.0)]
    assert seen == [*first, *second, ([0, 1], 2, False, 2.33)]
    iterator.reset()
    assert (iterator.epoch, iterator.position, iterator.epoch_detail) == (0, 0, 0.0)
    assert [next(iterator).tolist() for _ in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4]]  # a loop is one epoch
    assert iterator.epoch == 3


@ranks(2, on="threads")
@pytest.mark.parametrize("kind", ["multi-node", "synchronized"])
def test_next_has_the_order_of_loops_and_is_the_same_on_all_ranks(comm, kind):
    def loader():
        return DataLoader(torch.arange(7), 3, shuffle=True, generator=torch.Generator().manual_seed(1))

    steps, loops = made(kind, comm, loader()), made(kind, comm, loader())
    by_next = [next(steps).tolist() for _ in range(9)]
    assert by_next == [batch.tolist() for _ in range(3) for batch in loops]
    assert comm.allgather_obj(by_next) == [by_next] * 2
    assert by_next[:3] != by_next[3:6]


@ranks(2, on="threads")
def test_a_loader_without_a_length_stops_between_epochs(comm):
    iterator = made("multi-node", comm, map(torch.tensor, [[1], [2]]))
    assert [next(iterator).item(), next(iterator).item()] == [1, 2]
    assert not iterator.is_new_epoch
    with pytest.raises(StopIteration):
        next(iterator)
    assert iterator.epoch == 1


@ranks(2, on="threads")
def test_a_state_between_two_calls_of_next_continues_there(comm):
    def loader():
        return DataLoader(torch.arange(7), 2, shuffle=True, generator=torch.Generator().manual_seed(1))

    iterator, resumed = (create_synchronized_iterator(loader(), comm) for _ in range(2))
    before = [next(iterator).tolist() for _ in range(6)]
    state = iterator.state_dict()
    assert len(before) == 6 and (iterator.epoch, iterator.position) == (1, 2)
    next(resumed)
    resumed.load_state_dict(state)
    assert [next(resumed).tolist() for _ in range(5)] == [next(iterator).tolist() for _ in range(5)]
