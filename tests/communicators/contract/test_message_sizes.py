"""Messages of all sizes that transports treat differently, more at once than fit their buffers."""

from __future__ import annotations

import torch

from tests._worlds.marks import ranks

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


def large(number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(300 * 500) % 113 + number).reshape(300, 500).to(dtype)


@ranks(2)
@ranks(2, on="openmpi")
def test_large_values_that_are_kept_or_changed_stay_so_while_others_come_and_go(comm) -> None:
    everything = range(10)
    kept = {}
    for number in everything:
        if comm.rank == 0:
            comm.send(large(number), 1)
            assert torch.equal(comm.recv(1), large(number) + 1)
        else:
            received = comm.recv(0)
            assert torch.equal(received, large(number))
            received += 1
            comm.send(received, 0)
            if number % 3 != 1:
                kept[number] = received
            if number == 6:  # from now on, memory that was kept first may be used again
                del kept[0]
    assert all(torch.equal(x, large(number) + 1) for number, x in kept.items())


@ranks(2)
def test_large_values_outlive_their_communicator(comm) -> None:
    part = comm.split(0)
    assert part is not None
    if comm.rank == 0:
        for number in range(3):
            part.send(large(number), 1)
    received = [] if comm.rank == 0 else [part.recv(0) for _ in range(3)]
    part.finalize()
    if comm.rank == 0:
        comm.send(large(7), 1)
    else:
        assert torch.equal(comm.recv(0), large(7))
    assert all(torch.equal(x, large(number)) for number, x in enumerate(received))


@ranks(2)
def test_large_values_of_every_kind_arrive_in_every_mode(comm) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.bool):
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                if comm.rank == 0:
                    comm.send(large(1, dtype), 1)
                else:
                    received = comm.recv(0)
                    assert received.dtype == dtype and torch.equal(received, large(1, dtype))
                    assert received.is_inference() == (mode is torch.inference_mode)
