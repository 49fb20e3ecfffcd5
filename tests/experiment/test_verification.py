"""`torchmn verify` finds what gives other numbers, and only that."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor, nn

import torchmn
from tests.experiment.running import ModeResult, StepResults, configurations, deviations, experiment, verify

TEXT = """
dataset: {name: toy_images, side: 8, train: 12, test: 4}
model:
  module: tests.experiment.test_verification.NETWORK
  cost: cross_entropy
optimizer: {name: sgd, lr: 0.1}
epochs: 1
batch_size: 6
dtype: float64
"""


class Honest(nn.Module):
    """A network as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)
        self.linear = nn.Linear(2 * 8 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.conv(x).relu().flatten(1))


class LooksAtTheBatch(Honest):
    """A network whose outputs depend on which samples are in the batch beside them."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(dim=0, keepdim=True)


class CountsForwards(Honest):
    """A network whose outputs depend on how many forwards all ranks have made: ranks are threads of one process."""

    forwards = count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.forwards)


class ReadsTheBatch(Honest):
    """The same, with a value that no dry run on meta tensors can read."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * y.abs().max().item()


def rows_of(network: str, ranks: int) -> list[ModeResult]:
    chosen = experiment(TEXT.replace("NETWORK", network))
    return torchmn.run_threads(lambda comm: list(verify(chosen, comm, steps=2)), ranks)[0]


def test_an_ordinary_network_gives_the_same_numbers_in_every_mode():
    rows = rows_of("Honest", 4)
    assert [row.mode for row in rows] == ["datapar", "modelpar", *["halopar"] * 3, "halodatapar", "hybrid"]
    assert all(row.passed and not row.refusal for row in rows)
    assert all(max(row.deviations.values()) < 1e-12 for row in rows)


def test_a_network_that_depends_on_its_local_batch_is_detected():
    found = {row.mode: row for row in rows_of("ReadsTheBatch", 2)}
    assert not found["datapar"].passed
    assert found["datapar"].deviations["loss"] > 1e-6


def test_a_network_that_combines_samples_is_refused_where_ranks_have_different_ones():
    found = {row.mode: row for row in rows_of("LooksAtTheBatch", 2)}
    assert "mean combines samples" in found["datapar"].refusal
    assert found["halopar"].passed and not found["halopar"].refusal


def test_each_quantity_is_compared():
    numbers = StepResults([1.0, 2.0], torch.ones(2, 3), {"w": torch.ones(2), "b": torch.zeros(2)}, {"w": torch.ones(2)})
    assert deviations(numbers, numbers) == {"loss": 0, "outputs": 0, "gradients": 0, "weights": 0}
    for name, value, expected in (
        ("losses", [1.0, 2.002], {"loss": 1e-3}),
        ("outputs", torch.full((2, 3), 1.5), {"outputs": 0.5}),
        ("gradients", {"w": torch.ones(2), "b": torch.tensor([0.0, 0.25])}, {"gradients": 0.25}),
        ("weights", {"w": torch.tensor([1.0, float("nan")])}, {"weights": float("inf")}),
        ("weights", {}, {"weights": float("inf")}),
    ):
        changed = deviations(StepResults(**{**vars(numbers), name: value}), numbers)
        assert {k: round(v, 9) for k, v in changed.items() if v} == expected


def test_configurations_are_those_that_the_number_of_ranks_allows():
    assert [mode for mode, _ in configurations(3, (1, 28, 28))] == ["datapar", "modelpar", "halopar", "halopar"]
    assert [mode for mode, _ in configurations(4, (7,))] == ["datapar", "modelpar", "hybrid"]
    grids = [sizes for mode, sizes in configurations(6, (1, 28, 28)) if mode == "halopar"]
    assert [(sizes["height"], sizes["width"]) for sizes in grids] == [(1, 6), (2, 3), (3, 2), (6, 1)]
