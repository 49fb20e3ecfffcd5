"""Random numbers in a model's forward are those of one process, or an error is raised."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests._worlds import ranks
from tests.sharded.parity import Applied, assert_parity
from torchmn import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize

RECURRENT = nn.LSTM(6, 6, num_layers=2, dropout=0.5)
DRAWS = {
    "rand": lambda x: x + torch.rand(x.shape, device=x.device),
    "normal_": lambda x: x + x.new_empty(x.shape).normal_(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full((4, 6), 0.5, device=x.device)),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "between the layers of an LSTM": lambda x: RECURRENT(x)[0],
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout of channels by torch's own function": lambda x: torch.feature_dropout(x, 0.5, True),
    "alpha dropout by torch's own function": lambda x: torch.alpha_dropout(x, 0.5, True),
    "a fractional pool": lambda x: F.fractional_max_pool2d(x[:, None, :, None].expand(-1, -1, -1, 6), 2, 3),
    "binomial": lambda x: x + torch.binomial(torch.ones(4, 6), torch.full((4, 6), 0.5)).to(x.device),
}


@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS)
def test_random_functions_that_would_differ_between_ranks_are_refused(function):
    assert_refused(nn.Sequential(nn.Linear(6, 6), Applied(function)))


@pytest.mark.parametrize("function", [DRAWS["rand"], DRAWS["normal_"]], ids=["rand", "normal_"])
def test_they_are_refused_in_evaluation_too(function):
    assert_refused(nn.Sequential(nn.Linear(6, 6), Applied(function)).eval())


def assert_refused(net: nn.Module) -> None:

    def body(comm):
        for mode, sizes in (("modelpar", {"width": 2}), ("datapar", {"data": 2})):
            with pytest.raises(ParallelizeError, match=r"1 \(Applied\(\)\).*draws random numbers"):
                parallelize(net, ProcessGrid(comm, **sizes), mode)(torch.ones(4, 6))

    torchmn.run_threads(body, 2)


def test_the_same_model_is_allowed_in_evaluation_if_it_draws_nothing():
    net = nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Dropout(0.5)).eval()
    assert_parity(net, (4, 6), {"width": 2}, mode="modelpar", train=False)


class MonteCarlo(nn.Module):
    """Drops out in evaluation: an image, a vector, and what a user forgot to switch off."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Conv2d(2, 3, 3), nn.Linear(3, 4)
        self.drop = nn.Dropout(0.4)

    def train(self, mode: bool = True) -> MonteCarlo:
        super().train(mode)
        self.drop.train()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.out(self.drop(self.drop(self.layer(x)).mean((2, 3)))), 0.5)


@pytest.mark.parametrize("mode", ["halopar", "modelpar"])
def test_dropout_in_evaluation_has_the_mask_of_one_rank(mode):
    assert_parity(MonteCarlo(), (4, 2, 8, 8), {"height": 2}, mode=mode, train=False)


@pytest.mark.parametrize(("mode", "sizes"), [("datapar", {"data": 2}), ("halodatapar", {"data": 2, "height": 2})])
def test_dropout_in_evaluation_is_refused_along_data(mode, sizes):
    def body(comm):
        model = parallelize(MonteCarlo().eval(), ProcessGrid(comm, **sizes), mode)
        with pytest.raises(ParallelizeError, match=r"drop \(Dropout.*dropout in evaluation mode"):
            model(torch.full((2, 2, 4, 8), float(comm.rank)))

    torchmn.run_threads(body, prod(sizes.values()))


def test_a_generator_argument_is_allowed():
    def noisy(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(4)
        noise = torch.randn(9, 6, dtype=torch.float64, generator=generator)
        return x + noise[: x.shape[0]].to(x.device)

    assert_parity(nn.Sequential(nn.Linear(6, 6), Applied(noisy)), (4, 6), {"width": 2}, mode="modelpar")


def skipped_at_random(x: Tensor) -> Tensor:
    """Stochastic depth, as people write it."""
    noise = torch.rand(x.shape, dtype=x.dtype).to(x.device) + float(np.random.rand())
    return x * random.random() + noise


def test_the_dry_run_leaves_the_random_generators_unchanged():
    net, x = nn.Sequential(nn.Linear(6, 6), Applied(skipped_at_random)), torch.ones(4, 6)

    def seed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    expected = net(x)
    seed()
    with torchmn.create_communicator("solo") as comm:
        torch.testing.assert_close(parallelize(net, comm, "modelpar")(x), expected)


@ranks(2, on="mpi")
def test_processes_with_one_seed_draw_what_one_process_draws(comm):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 6), Applied(DRAWS["rand"])), torch.ones(4, 6)
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    got = parallelize(net, comm, "modelpar")(x)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dropout", [0, 0.0])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_recurrence_without_dropout_may_be_called_with_any_zero(dropout, by_name):
    weights = list(nn.LSTM(6, 6, num_layers=2).double()._flat_weights)
    settings = {"has_biases": True, "num_layers": 2, "dropout": dropout, "train": True}
    settings.update(bidirectional=False, batch_first=False)

    def one_step(x: Tensor) -> Tensor:
        state, mine = x.new_zeros(2, x.shape[0], 6), [w.to(x.device) for w in weights]
        given, named = ((), settings) if by_name else (settings.values(), {})
        return torch.lstm(x[None], (state, state), mine, *given, **named)[0][0]

    assert_parity(nn.Sequential(nn.Linear(6, 6), Applied(one_step)), (4, 6), {"data": 2}, mode="datapar")
