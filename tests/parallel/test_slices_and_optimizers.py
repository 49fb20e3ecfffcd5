"""Optimizers that need whole parameters refuse slices."""

import pytest
import torch
from torch import nn

import torchmn
from torchmn.errors import ArgumentError


def on_two_ranks(make):
    def work(comm):
        model = torchmn.parallelize(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), comm, "modelpar")
        return torchmn.create_multi_node_optimizer(make(model.parameters()), comm, model=model)

    return torchmn.run_threads(work, 2)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_torch_optimizers_over_whole_parameters_are_refused(kind):
    with pytest.raises(ArgumentError, match=rf"{kind.__name__} may compute over whole parameters.*Use SGD, Adam"):
        on_two_ranks(kind)


def test_an_unknown_optimizer_gets_a_warning():
    class Mine(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

    with pytest.warns(UserWarning, match="Mine may compute over whole parameters"):
        on_two_ranks(Mine)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_elementwise_optimizers_are_allowed(kind):
    assert len(on_two_ranks(lambda parameters: kind(parameters, lr=0.1))) == 2
