"""gather: on the root, every rank's tensor in rank order."""

import torch

from tests._worlds import every_world, ranks
from tests._worlds.data import SHAPES, assert_same_tuple, bits, odd_layouts, roots


@every_world
@ranks(3, on="openmpi")
def test_any_root_gets_every_tensor_in_rank_order_and_the_others_none(comm):
    for root in roots(comm):
        for shape in SHAPES:
            got = comm.gather(bits(shape, torch.float32, comm.rank), root)
            if comm.rank == root:
                assert_same_tuple(got, [bits(shape, torch.float32, r) for r in range(comm.size)], (root, shape))
            else:
                assert got is None


@every_world
def test_shapes_may_differ_in_extent_and_in_number_of_dims(comm):
    ragged = [bits(((3 * r) % 5, 2), torch.int16, r) for r in range(comm.size)]
    ragged[-1] = bits((1,) * comm.size, torch.int16, 99)
    root = comm.size - 1
    got = comm.gather(ragged[comm.rank], root)
    assert_same_tuple(got, ragged) if comm.rank == root else None
    assert comm.rank == root or got is None


@ranks(1, 2, 3)
def test_any_layout_arrives_with_its_values_and_without_its_graph(comm):
    for name in odd_layouts(0):
        got = comm.gather(odd_layouts(comm.rank)[name], 0)
        if comm.rank == 0:
            assert_same_tuple(got, [odd_layouts(r)[name].detach() for r in range(comm.size)], name)
        else:
            assert got is None


@ranks(1, 2)
def test_the_root_owns_what_it_got(comm):
    x = bits((6,), torch.uint8, comm.rank)
    got = comm.gather(x)
    comm.barrier()
    if comm.rank == 0:
        for part in got:
            part.zero_()
    comm.barrier()
    assert torch.equal(x, bits((6,), torch.uint8, comm.rank))
