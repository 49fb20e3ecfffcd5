"""Fusion is optional: models on tiles compute the same numbers without it, and its work grows with the model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds.jobs import run_job, without_package
from tests.fusion.small_tiles import let_small_tiles_have_wide_halos
from torchmn import ProcessGrid
from torchmn.sharded.fusion import conv_fusion

MODEL = """
import torch, torchmn
from torch import nn

def body(comm):
    torch.manual_seed(comm.rank + 1)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)]
    net = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Conv2d(4, 2, 3, padding=1))
    comm.bcast_data(net)
    x = comm.bcast(torch.randn(2, 1, 33, 32), 0)
    model = torchmn.parallelize(net, torchmn.ProcessGrid(comm, height=2), "halopar", input_shape=(1, 33, 32))
    y, expected = model(x), net(x)
    torch.testing.assert_close(y, expected)
    y.square().mean().backward()
    expected.square().mean().backward()
    for mine, theirs in zip(model.parameters(), net.parameters()):
        gradient = comm.allreduce(mine.grad) / 2
        torch.testing.assert_close(gradient, theirs.grad)

torchmn.run_threads(body, 2)
import sys
print("fusion was loaded:", "torchmn.sharded.fusion" in sys.modules, flush=True)
"""


@pytest.mark.parametrize(
    ("script", "env", "loaded"),
    [
        (MODEL, {}, True),
        (MODEL, {"TORCHMN_FUSION": "0"}, False),
        (without_package("torchmn.sharded.fusion") + MODEL, {}, False),
    ],
    ids=["with fusion", "switched off", "taken away"],
)
def test_a_model_on_tiles_computes_the_serial_numbers(script: str, env: dict[str, str], loaded: bool) -> None:
    result = run_job(script, 1, "solo", env=env)
    assert result.returncode == 0, result.output
    assert f"fusion was loaded: {loaded}" in result.output


def test_a_forward_looks_at_each_convolution_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    let_small_tiles_have_wide_halos(monkeypatch)
    calls = 0
    parameters_of = conv_fusion._parameters

    def counted(*args):
        nonlocal calls
        calls += 1
        return parameters_of(*args)

    monkeypatch.setattr(conv_fusion, "_parameters", counted)

    def body(comm, count):
        model = torchmn.parallelize(
            nn.Sequential(*[nn.Conv2d(1, 1, 3, padding=1) for _ in range(count)]),
            ProcessGrid(comm, height=2),
            "halopar",
            input_shape=(1, 16, 4),
        )
        model(torch.ones(1, 1, 16, 4))

    found = []
    for count in (40, 80):
        calls = 0
        torchmn.run_threads(partial(body, count=count), 2)
        found.append(calls)
    assert 0 < found[1] <= 2.2 * found[0]
