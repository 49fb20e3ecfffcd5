"""scatter: each rank gets its element of the root's tensors."""

import torch

from tests._worlds import every_world, ranks
from tests._worlds.data import SHAPES, assert_same, bits, odd_layouts, roots


@every_world
@ranks(3, on="openmpi")
def test_each_rank_gets_its_element_from_any_root(comm):
    for root in roots(comm):
        for shape in SHAPES:
            parts = [bits(shape, torch.float64, root, r) for r in range(comm.size)]
            for xs in (parts, tuple(parts), torch.stack(parts)):
                got = comm.scatter(xs if comm.rank == root else None, root)
                assert_same(got, parts[comm.rank], (root, shape))


@every_world
def test_shapes_may_differ_in_extent_and_in_number_of_dims(comm):
    parts = [bits(((3 * r) % 5, 2), torch.int64, r) for r in range(comm.size)]
    parts[-1] = bits((1,) * comm.size, torch.int64, 99)
    root = comm.size - 1
    for ignored in (None, "text", [torch.ones(1)] * (comm.size + 1)):
        assert_same(comm.scatter(parts if comm.rank == root else ignored, root), parts[comm.rank])


@ranks(1, 2, 3)
def test_any_layout_arrives_with_its_values_and_without_its_graph(comm):
    for name in odd_layouts(0):
        parts = [odd_layouts(r)[name] for r in range(comm.size)]
        assert_same(comm.scatter(parts if comm.rank == 0 else None), parts[comm.rank].detach(), name)
    columns = torch.arange(5.0 * comm.size).reshape(5, comm.size).t().requires_grad_()
    assert_same(comm.scatter(columns if comm.rank == 0 else None), columns[comm.rank].detach(), "columns")


@ranks(1, 2, 3)
def test_each_rank_owns_what_it_got(comm):
    parts = torch.arange(2.0 * comm.size).reshape(comm.size, 2)
    comm.scatter(parts if comm.rank == 0 else None).fill_(-1)
    comm.barrier()
    assert_same(parts, torch.arange(2.0 * comm.size).reshape(comm.size, 2))
