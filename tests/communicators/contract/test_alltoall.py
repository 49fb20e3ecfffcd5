"""alltoall: element j of rank i becomes element i of rank j."""

import torch

from tests._worlds import every_world, ranks
from tests._worlds.data import SHAPES, assert_same_tuple, bits, odd_layouts


@every_world
@ranks(3, on="openmpi")
def test_every_rank_gets_one_element_from_each(comm):
    for shape in (*SHAPES, (3000,)):
        mine = [bits(shape, torch.float32, comm.rank, peer) for peer in range(comm.size)]
        expected = [bits(shape, torch.float32, peer, comm.rank) for peer in range(comm.size)]
        for xs in (mine, tuple(mine), torch.stack(mine)):
            assert_same_tuple(comm.alltoall(xs), expected, shape)


@every_world
@ranks(2, on="openmpi")
def test_every_pair_may_have_its_own_shape(comm):
    def part(source: int, dest: int):
        extent = (source * 7 + dest * 3) % 5  # some are empty
        return bits((extent, *(1,) * (source % 2), dest + 1), torch.int32, source, dest)

    got = comm.alltoall([part(comm.rank, peer) for peer in range(comm.size)])
    assert_same_tuple(got, [part(peer, comm.rank) for peer in range(comm.size)])


@ranks(1, 2, 3)
def test_any_layout_arrives_with_its_values_and_without_its_graph(comm):
    for name in odd_layouts(0):
        got = comm.alltoall([odd_layouts(comm.rank, peer)[name] for peer in range(comm.size)])
        assert_same_tuple(got, [odd_layouts(peer, comm.rank)[name].detach() for peer in range(comm.size)], name)


@ranks(1, 2, 3)
def test_each_rank_owns_what_it_got(comm):
    mine = [torch.full((3,), float(peer)) for peer in range(comm.size)]
    got = comm.alltoall(mine)
    comm.barrier()
    for part in got:
        part.fill_(-1)
    comm.barrier()
    assert [x.tolist() for x in mine] == [[float(peer)] * 3 for peer in range(comm.size)]
