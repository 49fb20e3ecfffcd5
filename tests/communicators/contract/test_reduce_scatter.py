"""reduce_scatter: rank j gets the reduction over ranks of their element j."""

import numpy as np
import torch

from tests._worlds import every_world, ranks
from tests._worlds.data import SHAPES, assert_close, assert_same, numbers, odd_layouts, tensor

NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def column(comm, shape, op):
    """NumPy's result for this rank, where rank r passed numbers(shape, r, j) for rank j."""
    return NUMPY[op](np.stack([numbers(shape, r, comm.rank) for r in range(comm.size)]), axis=0)


@every_world
@ranks(3, on="openmpi")
def test_every_operation_gives_what_numpy_gives(comm):
    for shape in (*SHAPES, (1001,)):
        mine = [tensor(numbers(shape, comm.rank, peer)) for peer in range(comm.size)]
        for op in NUMPY:
            for xs in (mine, tuple(mine), torch.stack(mine)):
                assert_close(comm.reduce_scatter(xs, op), column(comm, shape, op))
    mine = [tensor(numbers((2,), comm.rank, peer)) for peer in range(comm.size)]
    assert_close(comm.reduce_scatter(mine), column(comm, (2,), "sum"))


@every_world
def test_every_rank_may_have_its_own_shape(comm):
    shapes = [((3 * r) % 5, *(2,) * (r % 2)) for r in range(comm.size)]
    mine = [tensor(numbers(shape, comm.rank, peer)) for peer, shape in enumerate(shapes)]
    assert_close(comm.reduce_scatter(mine), column(comm, shapes[comm.rank], "sum"))


@ranks(1, 2, 3)
def test_any_layout_is_reduced_without_its_graph(comm):
    for name in odd_layouts(0):
        mine = [odd_layouts(comm.rank, peer)[name] for peer in range(comm.size)]
        stack = [odd_layouts(r, comm.rank)[name].detach().resolve_conj().resolve_neg() for r in range(comm.size)]
        result = comm.reduce_scatter(mine)
        assert not result.requires_grad
        assert_close(result, np.stack(stack).sum(axis=0), 1e-6 if name == "channels last" else 1e-12)


@ranks(1, 2, 4)
def test_sixteen_bit_floats_are_summed_in_float32(comm):
    xs = torch.full((comm.size, 3), 60_000.0, dtype=torch.float16)
    assert comm.reduce_scatter(xs, "mean").tolist() == [60_000.0] * 3
    assert_same(xs, torch.full((comm.size, 3), 60_000.0, dtype=torch.float16), "the argument is untouched")


@ranks(1, 2, 3)
def test_each_rank_owns_what_it_got(comm):
    mine = [torch.full((3,), float(peer)) for peer in range(comm.size)]
    result = comm.reduce_scatter(mine)
    comm.barrier()
    result.fill_(-1)
    comm.barrier()
    assert [x.tolist() for x in mine] == [[float(peer)] * 3 for peer in range(comm.size)]
