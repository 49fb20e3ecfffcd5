"""Operations increment the version of tensors that they overwrite: a graph that needs the old values raises."""

import pytest
import torch
from torch import Tensor, nn

from tests._worlds import ranks

STALE = "modified by an inplace operation"
# Small ones go with the comparison of arguments, larger ones through the transport, the largest through shared memory.
LENGTHS = (3, 5_000, 40_000, 300_000)


def value_that_a_graph_keeps(length: int, dtype: torch.dtype, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """A tensor, and a result whose gradient needs its values."""
    shape = (2, length) if transposed else (length,)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    kept = x * 3
    kept = kept.t() if transposed else kept
    return kept, (kept * kept).sum()


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@ranks(1, 2, 3)
def test_an_allreduce_in_place_is_seen_by_autograd(comm, dtype, transposed, op):
    for length in LENGTHS:
        kept, result = value_that_a_graph_keeps(length, dtype, transposed)
        total = comm.allreduce(kept.detach(), op, in_place=True)
        assert total.unique().item() == (3 * comm.size if op == "sum" else 3)
        with pytest.raises(RuntimeError, match=STALE):
            result.backward()


@ranks(2, 3)
def test_bcast_data_is_seen_by_autograd_where_it_overwrites(comm):
    for length in LENGTHS:
        model = nn.Linear(length, 1, bias=False)
        x = torch.ones(1, length, requires_grad=True)
        result = model(x).sum()
        comm.bcast_data(model)
        if comm.rank == 0:
            result.backward()
            assert torch.equal(x.grad, model.weight.detach())
        else:
            with pytest.raises(RuntimeError, match=STALE):
                result.backward()


@ranks(2, 3)
def test_means_of_gradients_are_seen_by_autograd(comm):
    for length in LENGTHS:
        model = nn.Linear(length, 1, bias=False)
        (model(torch.ones(1, length)) ** 2).sum().backward(create_graph=True)
        assert model.weight.grad is not None
        penalty = (model.weight.grad**2).sum()
        comm.multi_node_mean_grad(model)
        with pytest.raises(RuntimeError, match=STALE):
            penalty.backward()


@ranks(2)
def test_inference_tensors_which_have_no_version_are_reduced_in_place(comm):
    with torch.inference_mode():
        for length in LENGTHS:
            x = torch.full((length,), 2.0)
            assert comm.allreduce(x, in_place=True) is x
            assert x.unique().item() == 2 * comm.size
