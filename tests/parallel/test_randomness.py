"""Random numbers in a model's forward are those of one process, or the model is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests.nn.parts.parity import Applied, assert_parity
from tests.worlds import ranks
from torchmn.communicators.process_grid import ProcessGrid
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
}


@pytest.mark.parametrize("function", DRAWS.values(), ids=DRAWS)
def test_numbers_that_ranks_would_draw_for_themselves_are_refused(function):
    net = nn.Sequential(nn.Linear(6, 6), Applied(function))

    def body(comm):
        for mode, sizes in (("modelpar", {"width": 2}), ("datapar", {"data": 2})):
            with pytest.raises(ParallelizeError, match=r"1 \(Applied\(\)\).*draws random numbers"):
                parallelize(net, ProcessGrid(comm, **sizes), mode)(torch.ones(4, 6))

    torchmn.run_threads(body, 2)


def test_the_same_model_may_draw_nothing_when_it_evaluates():
    net = nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Dropout(0.5)).eval()
    assert_parity(net, (4, 6), {"width": 2}, mode="modelpar", train=False)


def test_a_generator_of_ones_own_may_draw():
    def noisy(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(4)
        noise = torch.randn(9, 6, dtype=torch.float64, generator=generator)
        return x + noise[: x.shape[0]].to(x.device)

    assert_parity(nn.Sequential(nn.Linear(6, 6), Applied(noisy)), (4, 6), {"width": 2}, mode="modelpar")


@ranks(2, on="mpi")
def test_processes_with_one_seed_draw_what_one_process_draws(comm):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(6, 6), Applied(DRAWS["rand"])), torch.ones(4, 6)
    torch.manual_seed(1)
    expected = net(x)
    torch.manual_seed(1)
    got = parallelize(net, comm, "modelpar")(x)
    torch.testing.assert_close(got, expected)
