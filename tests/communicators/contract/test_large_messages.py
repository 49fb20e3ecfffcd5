"""Buffers above the largest single message are sent in pieces (2 GiB in MPI; here the limit is made small)."""

import numpy as np
import torch
from torch import nn

from tests._worlds import every_small_world, every_world, ranks
from tests._worlds.data import assert_close, assert_same, assert_same_tuple, bits, filled, numbers, tensor

# 1001 divides no element size: pieces must still end between elements. 8 is one element of float64.
LIMITS = (1001, 8)


def lengths(limit: int) -> tuple[int, ...]:
    """Numbers of float64 elements around the limit, and several times over it."""
    most = limit // 8
    return most, most + 1, 3 * most + 2


@every_small_world
@ranks(3, on="openmpi")
def test_moves_above_the_limit_arrive_whole(comm):
    everyone = range(comm.size)
    for limit in LIMITS:
        comm.max_message_bytes = limit
        for length in lengths(limit):
            whole = [bits((length + rank, 1), torch.float64, rank) for rank in everyone]
            mine = whole[comm.rank]
            root = comm.size - 1
            assert_same(comm.bcast(mine if comm.rank == root else None, root), whole[root])
            assert_same_tuple(comm.allgather(mine), whole)
            assert_same(comm.scatter(whole if comm.rank == root else None, root), mine)
            gathered = comm.gather(mine, root)
            assert_same_tuple(gathered, whole) if comm.rank == root else None
            rows = [bits((length * (peer % 2),), torch.float64, comm.rank, peer) for peer in everyone]
            columns = [bits((length * (comm.rank % 2),), torch.float64, peer, comm.rank) for peer in everyone]
            assert_same_tuple(comm.alltoall(rows), columns)


@every_small_world
@ranks(3, on="openmpi")
def test_reductions_above_the_limit_are_right(comm):
    for limit in LIMITS:
        comm.max_message_bytes = limit
        for length in lengths(limit):
            for dtype, relative in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2)):
                stack = np.stack([numbers((length,), rank) for rank in range(comm.size)])
                assert_close(comm.allreduce(tensor(stack[comm.rank], dtype)), stack.sum(axis=0), relative)
                xs = tensor(np.tile(stack[comm.rank], (comm.size, 1)), dtype)
                assert_close(comm.reduce_scatter(xs, "mean"), stack.mean(axis=0), relative)
            small = tensor(stack[comm.rank] * 3, torch.uint8 if limit % 2 else torch.uint16)
            assert_same(comm.allreduce(small, "max"), torch.stack(comm.allgather(small.int())).amax(0).to(small.dtype))


@ranks(2, 3)
@ranks(2, on="openmpi")
def test_messages_between_two_ranks_above_the_limit_arrive_whole_and_in_order(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for limit in LIMITS:
        comm.max_message_bytes = limit
        for length in lengths(limit):
            comm.send(bits((length,), torch.float64, comm.rank), right)
            comm.send_obj("x" * length * 8, right, tag=1)
            comm.send((bits((length,), torch.float64, comm.rank, 2), bits((3,), torch.bool, comm.rank)), right)
        for length in lengths(limit):
            assert comm.recv_obj(left, tag=1) == "x" * length * 8
            assert_same(comm.recv(left), bits((length,), torch.float64, left))
            second = (bits((length,), torch.float64, left, 2), bits((3,), torch.bool, left))
            assert_same_tuple(comm.recv(left), second)


@every_world
@ranks(3, on="openmpi")
def test_objects_above_the_limit_arrive_whole(comm):
    for limit in LIMITS:
        comm.max_message_bytes = limit
        mine = {"rank": comm.rank, "text": "y" * (20 * comm.rank + 3 * limit)}
        whole = [{"rank": rank, "text": "y" * (20 * rank + 3 * limit)} for rank in range(comm.size)]
        root = comm.size - 1
        assert comm.allgather_obj(mine) == whole
        assert comm.bcast_obj(mine, root) == whole[root]
        assert comm.gather_obj(mine, root) == (whole if comm.rank == root else None)
        assert comm.scatter_obj(whole if comm.rank == root else None, root) == mine


@every_world
def test_models_above_the_limit_are_broadcast_and_averaged(comm):
    comm.max_message_bytes = 1001

    def model(seed: int) -> nn.Module:
        return filled(nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 3)), seed)

    mine, expected = model(comm.rank), model(0)
    comm.bcast_data(mine)
    for x, y in zip(mine.parameters(), expected.parameters(), strict=True):
        assert_same(x.detach(), y.detach())
        x.grad = torch.full_like(x, float(comm.rank))
    comm.multi_node_mean_grad(mine)
    for x in mine.parameters():
        assert_close(x.grad, np.full(tuple(x.shape), (comm.size - 1) / 2), 1e-6)


@ranks(1, 2)
def test_the_default_limit_is_one_gibibyte(comm):
    assert comm.max_message_bytes == 1 << 30
