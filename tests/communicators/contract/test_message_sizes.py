"""Messages of every size that a transport treats in its own way, more of them at once than it has room for."""

from __future__ import annotations

import torch

from tests.worlds.marks import ranks

# Around 64 KB (one message), 512 KB (a copy), 4 MB (a slot of shared memory).
SIZES = (0, 1, 65_536, 65_537, 524_289, 4 << 20, (4 << 20) + 1)


@ranks(2, 3)
@ranks(2, on="openmpi")
def test_messages_of_every_size_arrive_in_any_order_though_the_sender_changes_its_tensor(comm) -> None:
    if comm.rank == 0:
        for tag, size in enumerate(SIZES):
            x = torch.full((size,), tag + 1, dtype=torch.uint8)
            comm.send(x, 1, tag)
            x.zero_()
    elif comm.rank == 1:
        for tag, size in reversed(list(enumerate(SIZES))):
            assert torch.equal(comm.recv(0, tag), torch.full((size,), tag + 1, dtype=torch.uint8))


@ranks(2)
@ranks(2, on="openmpi")
def test_more_large_messages_than_there_are_slots_arrive_in_order(comm) -> None:
    count = 7
    if comm.rank == 0:
        for number in range(count):
            comm.send(torch.full((1 << 18,), float(number)), 1)
    else:
        assert [comm.recv(0)[-1].item() for _ in range(count)] == list(range(count))
