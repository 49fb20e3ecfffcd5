"""allreduce: sum, mean, max, min and prod over ranks."""

import numpy as np
import torch

import torchmn
from tests._worlds import every_world, ranks
from tests._worlds.data import (
    SHAPES,
    assert_close,
    assert_refused,
    assert_same,
    numbers,
    odd_layouts,
    tensor,
)

NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


@every_world
@ranks(2, 3, on="openmpi")
def test_every_operation_gives_what_numpy_gives(comm):
    for shape in (*SHAPES, (10_001,)):
        stack = np.stack([numbers(shape, rank) for rank in range(comm.size)])
        for op, oracle in NUMPY.items():
            x = tensor(stack[comm.rank])
            result = comm.allreduce(x, op)
            assert_close(result, oracle(stack, axis=0))
            assert result.dtype == torch.float64 and result is not x
            assert_same(x, tensor(stack[comm.rank]), "the argument is untouched")
    stack = np.stack([numbers((3,), rank) for rank in range(comm.size)])
    assert_close(comm.allreduce(tensor(stack[comm.rank])), stack.sum(axis=0))


@every_world
def test_every_rank_gets_the_same_bits(comm):
    for dtype in (torch.float32, torch.float16, torch.complex64):
        for op in ("sum", "mean", "prod"):
            result = comm.allreduce(tensor(numbers((1001,), comm.rank), dtype), op)
            first = comm.bcast(result)
            assert_same(result, first, (dtype, op))


@every_world
@ranks(2, on="openmpi")
def test_in_place_overwrites_its_argument_and_returns_it(comm):
    stack = np.stack([numbers((6, 8), rank) for rank in range(comm.size)])
    layouts = {
        "plain": lambda x: x,
        "transposed": lambda x: x.t(),
        "strided": lambda x: x[::2, 1::3],
        "a slice": lambda x: x[2:4],
    }
    for name, layout in layouts.items():
        for dtype in (torch.float64, torch.bfloat16):
            whole = tensor(np.round(stack[comm.rank] * 4), dtype)
            x = layout(whole)
            result = comm.allreduce(x, "sum", in_place=True)
            assert result is x, name
            expected = tensor(np.round(stack[comm.rank] * 4), dtype)
            total = tensor(np.sum(np.round(stack * 4), axis=0), dtype)
            layout(expected).copy_(layout(total))
            assert_same(whole, expected, (name, dtype, "and nothing beside it changes"))


@ranks(1, 2, 3)
def test_any_layout_is_reduced_without_its_graph(comm):
    for name in odd_layouts(0):
        stack = np.stack([odd_layouts(r)[name].detach().resolve_conj().resolve_neg() for r in range(comm.size)])
        result = comm.allreduce(odd_layouts(comm.rank)[name])
        assert not result.requires_grad
        assert_close(result, stack.sum(axis=0), 1e-6 if name == "channels last" else 1e-12)


@ranks(1, 2, 3, 4)
@ranks(2, on="openmpi")
def test_sixteen_bit_floats_are_summed_in_float32(comm):
    large = torch.full((3,), 60_000.0, dtype=torch.float16)
    assert comm.allreduce(large, "mean").tolist() == [60_000.0] * 3
    # In bfloat16 itself, 256 + 1 is 256: added one by one, the ones would be lost.
    ones = torch.full((2,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
    expected = tensor([256.0 + comm.size - 1] * 2).to(torch.bfloat16)
    assert_same(comm.allreduce(ones), expected)


@ranks(2, 3)
def test_each_rank_owns_what_it_got(comm):
    for length in (3, 5000):
        x = torch.ones(length)
        result = comm.allreduce(x)
        comm.barrier()
        result.add_(comm.rank)
        comm.barrier()
        assert result.tolist() == [comm.size + comm.rank] * length
        assert x.tolist() == [1.0] * length


@ranks(1, 2, 3)
def test_operations_that_mean_nothing_for_a_dtype_are_refused(comm):
    wrong = [
        (torch.ones(2, dtype=torch.int32), "mean", "int32"),
        (torch.ones(2, dtype=torch.uint8), "mean", "uint8"),
        (torch.ones(2, dtype=torch.bool), "mean", "bool"),
        (torch.ones(2, dtype=torch.complex64), "max", "complex64"),
        (torch.ones(2, dtype=torch.complex128), "min", "complex128"),
        (torch.ones(2), "avg", "avg"),
        (torch.ones(2), "average", "mean"),
        (torch.ones(2), None, "None"),
    ]
    for x, op, word in wrong:
        assert_refused(comm, lambda x=x, op=op: comm.allreduce(x, op), "allreduce", word, kind=torchmn.ArgumentError)
