"""Misuse that would silently give other numbers raises an error: slices read directly, other inputs, single layers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchmn
from torchmn.errors import ArgumentError, MismatchError, ParallelizeError


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 4)

    def forward(self, x):
        return F.linear(self.encode(x).tanh(), self.encode.weight.t())


class Penalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x):
        return self.b(self.a(x).tanh()) * self.a.weight.norm()


class ScaledConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(1, 4, 3)

    def forward(self, x):
        return self.c(x) * self.c.weight.sum()


@pytest.mark.parametrize(
    ("make", "shape", "name"),
    [(TiedByHand, (6,), "encode.weight"), (Penalized, (6,), "a.weight"), (ScaledConvolution, (1, 8, 8), "c.weight")],
)
def test_a_slice_that_forward_reads_by_hand_is_refused_by_name(make, shape, name):
    def work(comm):
        with pytest.raises(ParallelizeError, match=f"{name} is read outside of its layer"):
            torchmn.parallelize(make(), comm, "modelpar", input_shape=shape)(torch.ones(2, *shape))

    torchmn.run_threads(work, 2)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))


def test_different_inputs_on_ranks_of_a_split_model_are_an_error_on_every_rank():
    x = torch.rand(3, 6)

    def work(comm):
        model = torchmn.parallelize(mlp(), comm, "modelpar")
        model(x)
        with pytest.raises(MismatchError, match="whole inputs"):
            model(x * (1 + comm.rank))
        with pytest.raises(MismatchError, match="whole inputs"):
            model(x.flip(0) if comm.rank else x)  # the same samples in another order
        with pytest.raises(MismatchError, match="whole inputs"):
            model(x[: 2 + comm.rank])

    torchmn.run_threads(work, 2)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


def test_a_model_that_one_rank_cannot_copy_is_an_error_on_every_rank():
    def body(comm):
        net = nn.Sequential(nn.Linear(4, 4))
        if comm.rank == 1:
            net.last = net(torch.ones(2, 4))  # as the old torch.nn.utils.weight_norm leaves a weight behind
        with pytest.raises(ParallelizeError, match="the model cannot be copied: Only Tensors created explicitly"):
            torchmn.parallelize(net, comm, "datapar")

    torchmn.run_threads(body, 2, timeout=20)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_would_be_lost_and_is_refused(register):
    net = nn.Sequential(nn.Linear(4, 4))
    getattr(net[0].weight, register)(lambda gradient: None)  # such as a mask of pruned weights

    def body(comm):
        with pytest.raises(ArgumentError, match=r"0\.weight has a hook"):
            torchmn.parallelize(net, comm, "datapar")

    torchmn.run_threads(body, 2)


def test_a_layer_in_eval_mode_on_one_rank_alone_is_an_error_on_every_rank():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Dropout(0.5), nn.Conv2d(2, 1, 3, padding=1))

    def work(comm):
        model = torchmn.parallelize(net, comm, "halopar", input_shape=(1, 8, 8))
        model[1].train(comm.rank == 0)
        with pytest.raises(MismatchError, match=r"(?s)rank 0: .*other mode \(\).*rank 1: .*other mode \('1',\)"):
            model(torch.rand(2, 1, 8, 4))

    torchmn.run_threads(work, 2)


def test_a_rank_in_eval_mode_alone_is_an_error_on_every_rank():
    def work(comm):
        model = torchmn.parallelize(convolutions(), comm, "halopar", input_shape=(1, 8, 8))
        model.train(comm.rank == 0)
        with pytest.raises(MismatchError, match="mode"):
            model(torch.rand(2, 1, 8, 4))

    torchmn.run_threads(work, 2)


@pytest.mark.guard("submodule_calls")
def test_a_layer_of_a_model_on_tiles_is_not_called_alone():
    def work(comm):
        model = torchmn.parallelize(convolutions(), comm, "halopar", input_shape=(1, 8, 8))
        with pytest.raises(ParallelizeError, match=r"0 \(Conv2d\) was called outside of the forward"):
            model[0](torch.rand(2, 1, 8, 4))

    torchmn.run_threads(work, 2)


def test_a_parameter_that_is_not_registered_is_refused_with_a_hint():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.scales = nn.Conv2d(1, 2, 3, padding=1), [nn.Parameter(torch.ones(8))]

        def forward(self, x):
            return self.c(x) * self.scales[0]

    def work(comm):
        with pytest.raises(ParallelizeError, match=r"nn\.ParameterList"):
            torchmn.parallelize(Hidden(), comm, "halopar", input_shape=(1, 8, 8))

    torchmn.run_threads(work, 2)
