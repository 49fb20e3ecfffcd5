"""Every dtype is sent bit by bit, and is reduced as NumPy reduces it."""

import numpy as np
import pytest
import torch

from tests._worlds import every_small_world, every_world, ranks
from tests._worlds.data import (
    COMPLEX,
    EVERY_DTYPE,
    FLOATS,
    SHAPES,
    SIGNED,
    UNSIGNED,
    assert_close,
    assert_equal,
    assert_same,
    assert_same_tuple,
    bits,
    factors,
    tensor,
    whole_numbers,
)

REDUCED = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, *SIGNED, *UNSIGNED, *COMPLEX, torch.bool)


@every_small_world
@ranks(2, on="openmpi")
def test_every_dtype_is_moved_bit_by_bit(comm):
    everyone = range(comm.size)
    for dtype in EVERY_DTYPE:
        for shape in SHAPES if comm.size < 4 else SHAPES[2:3]:
            what = (dtype, shape)
            mine = bits(shape, dtype, comm.rank)
            whole = [bits(shape, dtype, rank) for rank in everyone]
            assert_same(comm.bcast(mine if comm.rank == 0 else None), whole[0], what)
            assert_same_tuple(comm.allgather(mine), whole, what)
            assert_same(comm.scatter(whole if comm.rank == 0 else None), mine, what)
            rows = [bits(shape, dtype, comm.rank, peer) for peer in everyone]
            columns = [bits(shape, dtype, peer, comm.rank) for peer in everyone]
            assert_same_tuple(comm.alltoall(rows), columns, what)
            gathered = comm.gather(mine)
            if comm.rank == 0:
                assert_same_tuple(gathered, whole, what)
            if comm.size > 1:
                comm.send(mine, (comm.rank + 1) % comm.size)
                assert_same(comm.recv((comm.rank - 1) % comm.size), whole[comm.rank - 1], what)


def numpy_reduces(stack: np.ndarray, op: str, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return tensor({"sum": np.any, "max": np.any, "prod": np.all, "min": np.all}[op](stack, axis=0), dtype)
    reduced = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}[op](stack, axis=0)
    return tensor(reduced, dtype)


def operations(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype.is_complex:
        return "sum", "prod"
    return "sum", "max", "min", "prod"


@every_small_world
@ranks(2, on="openmpi")
def test_every_dtype_is_reduced_as_numpy_reduces_it(comm):
    everyone = range(comm.size)
    for dtype in REDUCED:
        for op in operations(dtype):
            make = factors if op == "prod" else whole_numbers
            for shape in ((), (0,), (37,)) if comm.size < 4 else ((37,),):
                stack = np.stack([make(shape, dtype, rank) for rank in everyone])
                result = comm.allreduce(tensor(stack[comm.rank], dtype), op)
                assert_equal(result, numpy_reduces(stack, op, dtype), (dtype, op, shape))
            mine = [tensor(make((5,), dtype, comm.rank, peer), dtype) for peer in everyone]
            column = np.stack([make((5,), dtype, rank, comm.rank) for rank in everyone])
            result = comm.reduce_scatter(mine, op)
            assert_equal(result, numpy_reduces(column, op, dtype), (dtype, op, "reduce_scatter"))


@every_world
def test_the_mean_of_floats_and_complex_numbers_is_rounded_once(comm):
    for dtype in (*FLOATS, *COMPLEX):
        stack = np.stack([whole_numbers((37,), dtype, rank) for rank in range(comm.size)])
        result = comm.allreduce(tensor(stack[comm.rank], dtype), "mean")
        assert result.dtype == dtype
        assert_close(result, stack.mean(axis=0), 2 * torch.finfo(dtype).eps)


@every_world
def test_extreme_integers_are_not_rounded_through_floats(comm):
    for dtype in (torch.int64, torch.uint64, torch.uint32):
        top = np.array([2**62 + 1, 2**62 + 3] if dtype != torch.uint32 else [2**31 + 1, 2**31 + 3])
        x = tensor(top, dtype) if comm.rank == comm.size - 1 else tensor(np.zeros(2, np.int64), dtype)
        assert_same(comm.allreduce(x), tensor(top, dtype), dtype)
        assert_same(comm.allreduce(x, "max"), tensor(top, dtype), dtype)


@ranks(2, 3)
def test_nan_and_infinity_are_not_lost(comm):
    x = torch.tensor([float("nan") if comm.rank == 0 else 1.0, float("inf") if comm.rank == 1 else 1.0])
    total = comm.allreduce(x)
    assert torch.isnan(total[0]) and torch.isposinf(total[1])


@ranks(2, 3)
@pytest.mark.parametrize("length", [3, 5000])
@pytest.mark.parametrize("op", ["max", "min"])
def test_the_largest_and_the_smallest_of_numbers_with_nan_are_nan(comm, op, length):
    for culprit in range(comm.size):
        x = torch.arange(length, dtype=torch.float32)
        x[1] = float("nan") if comm.rank == culprit else 1.0
        result = comm.allreduce(x, op)
        assert torch.isnan(result[1]), f"lost rank {culprit}'s NaN"
        assert torch.isnan(result).sum() == 1
