"""AllreducePersistent: running statistics of the union of all ranks' batches."""

import numpy as np
import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused, numbers, tensor
from torchmn.training import AllreducePersistent


class Buffers(nn.Module):
    def __init__(self, rank: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(2, momentum=None)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.instance.running_var = torch.full((2,), rank + 1.0)
        self.register_buffer("average", torch.tensor(float(rank), dtype=torch.float16))
        self.register_buffer("spectrum", torch.full((2,), complex(rank, 1)))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("mask", torch.tensor([rank == 0]))
        self.register_buffer("scratch", torch.tensor(float(rank)), persistent=False)


@ranks(1, 2, 3, 4, on="threads")
@ranks(2, on=("mpi", "gloo"))
def test_the_variance_is_that_of_the_union_and_ranks_count_by_what_they_saw(comm):
    def batches(rank):
        return [tensor(numbers((50, 2), rank, k) * (rank + 1) + 7 * rank, torch.float64) for k in range(2 * rank)]

    model = nn.Sequential(nn.BatchNorm1d(2, momentum=None, dtype=torch.float64))
    for batch in batches(comm.rank):  # rank 0 sees nothing: its zeros and ones must not count
        model(batch)
    AllreducePersistent(model, comm)()
    layer = model[0]
    seen = [batch.numpy() for rank in range(comm.size) for batch in batches(rank)]
    if not seen:
        assert layer.running_mean.tolist() == [0, 0] and layer.running_var.tolist() == [1, 1]
        return
    # Within the batches of a rank, torch averages variances; between ranks, the union counts.
    weights = [2 * rank for rank in range(1, comm.size)]
    means = [np.mean([b.mean(0) for b in map(torch.Tensor.numpy, batches(rank))], 0) for rank in range(1, comm.size)]
    variances = [
        np.mean([b.var(0, ddof=1) for b in map(torch.Tensor.numpy, batches(rank))], 0) for rank in range(1, comm.size)
    ]
    mean = np.average(means, 0, weights)
    variance = np.average(np.array(variances) + (np.array(means) - mean) ** 2, 0, weights)
    np.testing.assert_allclose(layer.running_mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(layer.running_var.numpy(), variance, rtol=1e-12)
    np.testing.assert_allclose(layer.running_mean.numpy(), np.concatenate(seen).mean(0), rtol=1e-12)
    np.testing.assert_allclose(layer.running_var.numpy(), np.concatenate(seen).var(0), rtol=0.03)
    assert layer.num_batches_tracked == 2 * (comm.size - 1)


@ranks(2, on="threads")
@pytest.mark.parametrize("number", [int, float, np.int64, torch.tensor])
def test_a_weight_replaces_the_number_of_batches(comm, number):
    layer = nn.BatchNorm1d(1)
    layer.running_mean.fill_(4.0 * comm.rank)
    layer.running_var.fill_(1.0 + comm.rank)
    layer.num_batches_tracked.fill_(3)
    AllreducePersistent(layer, comm)(weight=number(1 + 2 * comm.rank))  # weights 1 and 3
    assert layer.running_mean.item() == 3.0
    assert layer.running_var.item() == (1 * (1 + 9) + 3 * (2 + 1)) / 4
    before = [x.clone() for x in layer.buffers()]
    AllreducePersistent(layer, comm)()
    assert all(torch.equal(x, y) for x, y in zip(layer.buffers(), before, strict=True)), "equal ones are not changed"


@ranks(1, 2, 3, on="threads")
@ranks(2, on="mpi")
@pytest.mark.parametrize("weight", [None, 0])
def test_untracked_statistics_become_equal_too(comm, weight):
    layer = nn.BatchNorm1d(1, dtype=torch.float64)  # with statistics from elsewhere, such as a converted model
    layer.running_mean.fill_(4.0 * comm.rank)
    layer.running_var.fill_(1.0 + comm.rank)
    layer.num_batches_tracked.fill_(0 if weight is None else 5)
    AllreducePersistent(layer, comm)(weight)
    means, variances = 4.0 * np.arange(comm.size), 1.0 + np.arange(comm.size)
    assert layer.running_mean.item() == pytest.approx(means.mean(), rel=1e-12)
    assert layer.running_var.item() == pytest.approx((variances + (means - means.mean()) ** 2).mean(), rel=1e-12)
    assert len({tuple(x.item() for x in buffers) for buffers in comm.allgather_obj(list(layer.buffers()))}) == 1


@ranks(3, on="threads")
def test_other_float_buffers_are_averaged_and_integers_unchanged(comm):
    model = Buffers(comm.rank)
    names = dict(model.named_buffers())
    AllreducePersistent(model, comm)()
    assert model.average.item() == 1.0 and model.average.dtype == torch.float16
    assert model.spectrum.tolist() == [1 + 1j, 1 + 1j]
    assert model.instance.running_var.tolist() == [2.0, 2.0]
    assert (model.count.item(), model.mask.item(), model.scratch.item()) == (comm.rank, comm.rank == 0, comm.rank)
    assert all(x is names[name] for name, x in model.named_buffers()), "the same tensors as before"
    AllreducePersistent(nn.Linear(2, 2), comm)()


@ranks(2, on="threads")
def test_models_that_differ_and_wrong_weights_are_refused_on_every_rank(comm):
    different = nn.Sequential(nn.BatchNorm1d(2 + comm.rank))
    call = AllreducePersistent(different, comm)
    assert_refused(comm, call, "0.running_mean", "AllreducePersistent", kind=torchmn.MismatchError)
    call = AllreducePersistent(nn.BatchNorm1d(2), comm)
    assert_refused(comm, lambda: call(weight=-1 if comm.rank else 1), "rank 1", "-1", kind=torchmn.ArgumentError)
    assert_refused(comm, lambda: call(weight=None if comm.rank else 1), "weighted", kind=torchmn.MismatchError)
    with pytest.raises(torchmn.ArgumentError, match="module"):
        AllreducePersistent("net", comm)
