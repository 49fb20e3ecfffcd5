"""allgather: every rank's tensor in rank order, everywhere."""

import torch

from tests._worlds import every_world, ranks
from tests._worlds.data import SHAPES, assert_same_tuple, bits, odd_layouts


@every_world
@ranks(3, on="openmpi")
def test_every_rank_gets_every_tensor_in_rank_order(comm):
    for shape in (*SHAPES, (5000,)):
        got = comm.allgather(bits(shape, torch.float64, comm.rank))
        assert_same_tuple(got, [bits(shape, torch.float64, r) for r in range(comm.size)], shape)


@every_world
def test_shapes_may_differ_in_extent_and_in_number_of_dims(comm):
    ragged = [bits(((3 * r) % 5, 2), torch.float16, r) for r in range(comm.size)]
    ragged[-1] = bits((1,) * comm.size, torch.float16, 99)
    assert_same_tuple(comm.allgather(ragged[comm.rank]), ragged)


@every_world
def test_only_one_rank_may_have_something(comm):
    whole = [bits((300 if r == comm.size - 1 else 0,), torch.bfloat16, r) for r in range(comm.size)]
    assert_same_tuple(comm.allgather(whole[comm.rank]), whole)


@ranks(1, 2, 3)
def test_any_layout_arrives_with_its_values_and_without_its_graph(comm):
    for name in odd_layouts(0):
        got = comm.allgather(odd_layouts(comm.rank)[name])
        assert_same_tuple(got, [odd_layouts(r)[name].detach() for r in range(comm.size)], name)


@ranks(1, 2, 3)
def test_each_rank_owns_what_it_got(comm):
    x = torch.full((4,), float(comm.rank))
    got = comm.allgather(x)
    comm.barrier()
    for part in got:
        part.add_(100 * (comm.rank + 1))
    comm.barrier()
    assert x.tolist() == [comm.rank] * 4
    assert [part.tolist() for part in got] == [[r + 100 * (comm.rank + 1)] * 4 for r in range(comm.size)]
