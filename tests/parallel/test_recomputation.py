"""torch.utils.checkpoint inside a parallel model: the same numbers, or an error."""

from __future__ import annotations

import gc

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.sharded.parity import assert_parity
from torchmn.errors import ParallelizeError

PLACES = [
    ("halopar", {"height": 2}),
    ("modelpar", {"width": 2}),
    ("datapar", {"data": 2}),
    ("halodatapar", {"data": 2, "height": 2}),
]


class Recomputed(nn.Module):
    def __init__(self, between: nn.Module, reentrant: bool = False) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1))
        self.vector = nn.Sequential(nn.Linear(3, 4), between, nn.Linear(4, 2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.image, x, use_reentrant=False).mean((2, 3))
        return checkpoint(self.vector, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(("mode", "grid"), PLACES, ids=str)
def test_recomputed_parts_have_the_serial_gradient(mode, grid):
    assert_parity(Recomputed(nn.Tanh()), (4, 1, 8, 8), grid, mode=mode)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.BatchNorm1d(4)], ids=["dropout", "batch_norm"])
def test_functions_that_a_recomputation_would_change_are_refused(between, reentrant):
    with pytest.raises(ParallelizeError, match="Leave it out of the checkpointed part"):
        assert_parity(Recomputed(between, reentrant), (4, 1, 8, 8), {"data": 2}, mode="datapar")
    # Older releases of torch leave a checkpoint that raised as it is until it is collected, and then take a hook from
    # whichever thread runs: here rather than in a rank of another test.
    gc.collect()


def test_statistics_of_tiles_are_recomputed():
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x, use_reentrant=False)

    assert_parity(Net(), (4, 1, 8, 8), {"data": 2, "height": 2})
