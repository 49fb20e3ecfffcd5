"""split: groups of ranks that do not disturb each other, and the life of a communicator."""

import pytest
import torch

import torchmn
from tests._worlds import every_world, ranks
from tests._worlds.data import assert_refused, assert_still_works


@every_world
@ranks(3, on="openmpi")
def test_ranks_of_one_color_form_a_group_in_rank_order(comm):
    part = comm.split(comm.rank % 2)
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    assert part.allgather_obj(comm.rank) == members
    assert part.allreduce(torch.tensor(comm.rank)).item() == sum(members)
    part.finalize()


@every_world
def test_the_key_orders_a_group_and_the_old_rank_breaks_ties(comm):
    reverse = comm.split(7, key=-comm.rank)
    assert reverse.allgather_obj(comm.rank) == list(reversed(range(comm.size)))
    tied = comm.split(0, key=comm.rank // 2 % 2)
    assert tied.allgather_obj(comm.rank) == sorted(range(comm.size), key=lambda rank: (rank // 2 % 2, rank))
    tied.finalize()
    reverse.finalize()


@every_world
def test_a_rank_without_a_color_gets_none(comm):
    part = comm.split(None if comm.rank == comm.size - 1 else 3)
    if comm.rank == comm.size - 1:
        assert part is None
    else:
        assert part.allgather_obj(comm.rank) == list(range(comm.size - 1))
    assert comm.split(None) is None
    assert_still_works(comm)


@every_world
@ranks(3, on="openmpi")
def test_a_split_can_be_split(comm):
    rows = comm.split(comm.rank // 2, comm.rank)
    column = rows.split(rows.rank, -comm.rank)
    row = [rank for rank in range(comm.size) if rank // 2 == comm.rank // 2]
    assert rows.allgather_obj(comm.rank) == row
    assert column.allgather_obj(comm.rank) == [comm.rank]
    again = rows.split(0, -rows.rank)
    assert again.allgather_obj(comm.rank) == row[::-1]
    columns = comm.split(comm.rank % 2, comm.rank)
    assert columns.allgather_obj(comm.rank) == [r for r in range(comm.size) if r % 2 == comm.rank % 2]
    for part in (columns, again, column, rows):
        part.finalize()


@ranks(2, 3, 4)
@ranks(2, on="openmpi")
def test_messages_of_a_split_and_of_its_parent_do_not_mix(comm):
    part = comm.split(0, comm.rank)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.send(torch.tensor(1), right)
    part.send(torch.tensor(2), right)
    comm.send_obj("parent", right)
    part.send_obj("split", right)
    assert part.recv(left).item() == 2
    assert part.recv_obj(left) == "split"
    assert comm.recv(left).item() == 1
    assert comm.recv_obj(left) == "parent"


@ranks(3, 4)
def test_groups_work_without_waiting_for_each_other(comm):
    part = comm.split(min(comm.rank, 1), comm.rank)
    turns = 7 if comm.rank == 0 else 2
    for turn in range(turns):
        assert part.allreduce(torch.tensor(turn)).item() == turn * part.size
    assert_still_works(comm)


@ranks(1, 2, 3)
def test_a_split_inherits_the_configuration_and_keeps_its_own(comm):
    comm.max_message_bytes = 12_345
    part = comm.split(0)
    assert part.max_message_bytes == 12_345
    assert part.device == comm.device
    part.max_message_bytes = 99
    assert comm.max_message_bytes == 12_345


@ranks(1, 2, 3)
def test_a_wrong_color_or_key_on_one_rank_is_refused_on_every_rank(comm):
    last = comm.rank == comm.size - 1
    for color, key in (("red", 0), (1.5, 0), (0, "first"), (0, None)):
        call = lambda color=color, key=key: comm.split(color, key) if last else comm.split(0)  # noqa: E731
        assert_refused(comm, call, f"rank {comm.size - 1}", "split", "expected", kind=torchmn.ArgumentError)


@every_world
@ranks(2, on="openmpi")
def test_a_communicator_can_be_finalized_twice_and_is_a_context_manager(comm):
    with comm.split(0, comm.rank) as part:
        assert_still_works(part)
    part.finalize()
    part.finalize()
    with pytest.raises(torchmn.TorchMNError, match="finalized"):
        part.allreduce(torch.ones(1))
    assert_still_works(comm)


@ranks(2, 3)
def test_finalize_waits_until_what_was_sent_has_been_received(comm):
    part = comm.split(0, comm.rank)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    part.send(torch.full((1_000_000,), float(comm.rank)), right)
    received = part.recv(left)
    part.finalize()
    assert torch.equal(received, torch.full((1_000_000,), float(left)))


@ranks(2)
def test_an_exception_in_the_block_is_not_hidden(comm):
    with pytest.raises(ZeroDivisionError), comm.split(0, comm.rank):
        _ = 1 / 0
    assert_still_works(comm)
