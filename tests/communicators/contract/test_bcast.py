"""bcast: the root's tensor, everywhere."""

import torch

from tests._worlds import every_world, ranks
from tests._worlds.data import SHAPES, assert_same, bits, odd_layouts, roots


@every_world
@ranks(2, 3, on="openmpi")
def test_every_rank_gets_the_tensor_of_any_root(comm):
    for root in roots(comm):
        for shape in (*SHAPES, (257, 3), (40_000,)):
            x = bits(shape, torch.float64, root, len(shape))
            got = comm.bcast(x.clone() if comm.rank == root else None, root)
            assert_same(got, x, (root, shape))


@every_world
def test_what_other_ranks_pass_is_ignored(comm):
    root = comm.size - 1
    x = bits((4,), torch.int32, 1)
    for other in (None, "text", torch.ones(9, 9), torch.ones(4, dtype=torch.int32)):
        assert_same(comm.bcast(x if comm.rank == root else other, root), x)


@ranks(1, 2, 3)
def test_any_layout_arrives_with_its_values_and_without_its_graph(comm):
    for name, x in odd_layouts(1).items():
        assert_same(comm.bcast(x if comm.rank == 0 else None), x.detach(), name)


@ranks(2, 3)
def test_each_rank_owns_what_it_got(comm):
    for length in (5, 5000):
        got = comm.bcast(torch.zeros(length) if comm.rank == 0 else None)
        comm.barrier()
        got.fill_(comm.rank)
        comm.barrier()
        assert got.tolist() == [comm.rank] * length
