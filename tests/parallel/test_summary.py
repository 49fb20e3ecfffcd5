"""parallel_summary: which weights are sharded and which replicated; and the warning of parallelize."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmn
from torchmn import Communicator
from torchmn.parallel import ParallelSummary


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.attend(x, x, x)[0]


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


def parallel(
    make: Callable[[], nn.Module], mode: str, shape: tuple[int, ...], size: int = 2
) -> tuple[list[ParallelSummary], list[str]]:
    """Every rank's summary, and the warnings of all."""

    def run(comm: Communicator) -> ParallelSummary:
        torch.manual_seed(0)
        return torchmn.parallel_summary(torchmn.parallelize(make(), comm, mode, input_shape=shape))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        summaries = torchmn.run_threads(run, size)
    return summaries, [str(one.message) for one in caught if "stay whole" in str(one.message)]


def transformer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))


@pytest.mark.parametrize(
    ("make", "whole", "share"),
    [
        (Attends, {"attend": "MultiheadAttention", "attend.out_proj": "NonDynamicallyQuantizableLinear"}, 288 / 360),
        (Recurs, {"lstm": "LSTM"}, 576 / 612),
        (
            transformer,
            {
                "1.self_attn": "MultiheadAttention",
                "1.self_attn.out_proj": "NonDynamicallyQuantizableLinear",
                "1.linear1": "Linear",
                "1.linear2": "Linear",
            },
            568 / 672,
        ),
    ],
)
def test_modules_that_modelpar_does_not_cut_are_named_once_with_their_share(
    make: Callable[[], nn.Module], whole: dict[str, str], share: float
) -> None:
    summaries, warned = parallel(make, "modelpar", (5, 8))
    assert all(summary == summaries[0] for summary in summaries)
    matrices = [row for row in summaries[0].replicated if row.has_matrix]
    assert {row.name: row.kind for row in matrices} == whole
    assert sum(row.share for row in matrices) == pytest.approx(share)
    (text,) = warned
    assert f"{share:.1%} of the weights stay whole" in text
    assert all(f"{name} ({kind}, " in text for name, kind in whole.items())
    assert summaries[0].weights == sum(p.numel() for p in make().parameters())


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_weights_are_counted_whole_without_a_warning(size: int) -> None:
    def make() -> nn.Module:
        # 7 channels and 5 features do not divide evenly; the norm and the biases stay whole, and are small.
        return nn.Sequential(
            nn.Conv2d(2, 7, 3), nn.BatchNorm2d(7), nn.Flatten(), nn.Linear(7 * 16, 5), nn.ReLU(), nn.Linear(5, 4)
        )

    (first, *others), warned = parallel(make, "modelpar", (2, 6, 6), size)
    assert warned == []
    assert all(other == first for other in others)
    assert [(row.name, row.ranks, row.weights) for row in first.rows] == [
        ("0", size, 7 * 2 * 9 + 7),
        ("1", 1, 14),
        ("3", size, 7 * 16 * 5 + 5),
        ("5", size, 5 * 4 + 4),
    ]
    assert sum(row.share for row in first.rows) == pytest.approx(1)
    table = str(first).splitlines()
    assert table[0] == "mode modelpar"
    assert table[2].split() == ["0", "ChannelConv2d", "sharded", "over", str(size), "ranks", "133", "18.1%"]
    assert table[3].split() == ["1", "BatchNorm2d", "replicated", "on", "every", "rank", "14", "1.9%"]
    assert table[-1].split() == ["all", "14", "replicated", "(1.9%)", "736"]


@pytest.mark.parametrize(("mode", "cut"), [("datapar", set()), ("halopar", {"2"})])
def test_other_modes_have_a_summary_and_no_warning(mode: str, cut: set[str]) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(2 * 36, 3))

    summaries, warned = parallel(make, mode, (1, 6, 6))
    assert warned == []
    assert {row.name for row in summaries[0].rows if row.ranks == 2} == cut
    assert summaries[0].weights == sum(p.numel() for p in make().parameters())


def test_one_rank_is_not_warned_and_a_shared_parameter_counts_once() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    summaries, warned = parallel(make, "modelpar", (4,), size=1)
    assert warned == []
    assert [(row.name, row.weights, row.share) for row in summaries[0].rows] == [("0", 16, 1.0)]


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None])
def test_what_is_not_parallel_is_refused(model: Any) -> None:
    with pytest.raises(torchmn.ArgumentError, match="expected a model that parallelize returned"):
        torchmn.parallel_summary(model)
