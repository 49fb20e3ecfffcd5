"""Every collective function with short floats, tensors without elements and parts of different shapes."""

import pytest
import torch

from tests._worlds import ranks
from torchmn import functions as F

# What each rank calls, given a tensor for each rank; and what each rank gets in terms of all ranks' tensors.
CALLS = {
    "bcast": lambda comm, xs: F.bcast(comm, xs[0], comm.size - 1),
    "gather": lambda comm, xs: F.gather(comm, xs[0], comm.size - 1),
    "scatter": lambda comm, xs: F.scatter(comm, xs if comm.rank == comm.size - 1 else None, comm.size - 1),
    "allgather": lambda comm, xs: F.allgather(comm, xs[0]),
    "alltoall": lambda comm, xs: F.alltoall(comm, xs),
    "allreduce": lambda comm, xs: F.allreduce(comm, xs[0]),
    "reduce_scatter": lambda comm, xs: F.reduce_scatter(comm, xs),
}


def results(found) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@ranks(3, on="threads")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_short_floats_keep_their_dtype_there_and_back(comm, name, dtype):
    xs = [torch.full((2,), 1.0 + comm.rank + part, dtype=dtype, requires_grad=True) for part in range(comm.size)]
    ys = results(CALLS[name](comm, xs))
    delegate = name == "gather" and comm.rank != comm.size - 1
    assert delegate or all(y.dtype == dtype for y in ys)
    sum((y.float() * 2).sum() for y in ys).backward()
    for x in xs:
        assert x.grad is None or (x.grad.dtype == dtype and bool((x.grad % 2 == 0).all()))
    roots = {"bcast": 2 * comm.size, "scatter": 2}
    mine = [x.grad.tolist() for x in xs if x.grad is not None]
    if name in roots:
        expected = roots[name] if comm.rank == comm.size - 1 else 0
        assert all(set(grad) == {float(expected)} for grad in mine) and (mine or not expected)
    else:
        expected = 2.0 * (comm.size if name in ("allgather", "allreduce") else 1)
        assert mine and all(set(grad) == {expected} for grad in mine)


@ranks(3, on="threads")
@pytest.mark.parametrize("name", ["gather", "scatter", "allgather", "alltoall"])
def test_parts_without_elements_and_of_different_shapes(comm, name):
    # ShardedTensor p of rank r has r * p rows: none at all on rank 0, and in every part 0.
    rows = [comm.rank * part for part in range(comm.size)]
    xs = [torch.ones(n, 2, requires_grad=True) for n in (rows if name in ("scatter", "alltoall") else [comm.rank])]
    ys = results(CALLS[name](comm, xs))
    last = comm.size - 1
    expected = {
        "gather": [(r, 2) for r in range(comm.size)] if comm.rank == last else [()],
        "scatter": [(last * comm.rank, 2)],
        "allgather": [(r, 2) for r in range(comm.size)],
        "alltoall": [(r * comm.rank, 2) for r in range(comm.size)],
    }
    assert [tuple(y.shape) for y in ys] == expected[name]
    sum(y.sum() for y in ys).backward()
    for x in xs:
        ones = float(comm.size) if name == "allgather" else 1.0
        if name != "scatter" or comm.rank == last:
            assert torch.equal(x.grad, torch.full_like(x, ones))


@ranks(3, on="threads")
@pytest.mark.parametrize("name", ["bcast", "allreduce", "reduce_scatter"])
def test_tensors_without_elements(comm, name):
    xs = [torch.ones(0, 4, requires_grad=True) for _ in range(comm.size)]
    (y,) = results(CALLS[name](comm, xs))
    assert tuple(y.shape) == (0, 4)
    y.sum().backward()
    assert all(x.grad is None or tuple(x.grad.shape) == (0, 4) for x in xs)
