"""HaloLayer: any windows, with the same numbers on one rank and on tiles, or an error."""

import pytest
import torch
from torch import Tensor, nn

from tests.sharded.parity import assert_parity
from torchmn.errors import ArgumentError
from torchmn.geometry import Window
from torchmn.nn import HaloLayer


class Cubes(HaloLayer):
    """The sum of the cubes in a window, times a learned factor."""

    def __init__(self, *windows: Window, fill: float = 0.0, padding_mode: str = "zeros"):
        super().__init__()
        self.windows, self.fill, self.padding_mode = windows, fill, padding_mode
        self.factor = nn.Parameter(torch.ones(()))

    def local(self, x: Tensor) -> Tensor:
        for dim, window in enumerate(self.windows, start=2):
            x = x.unfold(dim, window.span, window.stride)
        x = x[(..., *(slice(None, None, window.dilation) for window in self.windows))]
        return x.flatten(2 + len(self.windows)).pow(3).sum(-1) * self.factor


WINDOWS = {
    "same": (Window(3, padding=(1, 1)), Window(3, padding=(1, 1))),
    "negative": (Window(3, padding=(-1, -1)), Window(1, 3, (-2, -1))),
    "asymmetric": (Window(3, 2, (0, 2)), Window(2, 1, (1, 0))),
    "ceil_mode": (Window(3, 2, (1, 1), ceil_mode=True), Window(2, 3, ceil_mode=True)),
    "dilated": (Window(3, 1, (2, 2), 2), Window(2, dilation=3)),
    "wider than a tile": (Window(9, 1, (4, 4)), Window(1)),
}


@pytest.mark.parametrize("grid", [(2, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("settings", [{"fill": 2.5}, {"padding_mode": "reflect"}], ids=str)
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_tiles_together_are_the_layer_on_one_rank(windows, settings, grid):
    assert_parity(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), Cubes(*windows, **settings)), (2, 1, 11, 10), grid)


def test_lines_and_volumes():
    assert_parity(Cubes(Window(3, padding=(1, 1))), (2, 1, 11), (3,))
    assert_parity(Cubes(*[Window(3, padding=(1, 1))] * 3), (2, 1, 5, 6, 7), (2, 1, 2))


def test_ranks_without_outputs_take_part_and_parameters_keep_their_role():
    assert_parity(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), Cubes(Window(3, 4), Window(3, 4))), (2, 1, 9, 9), (3, 3))


def test_a_layer_that_is_used_twice():
    layer = Cubes(Window(3, padding=(1, 1)), Window(3, padding=(1, 1)))
    assert_parity(nn.Sequential(layer, nn.Tanh(), layer), (2, 1, 9, 9), (2, 2))


def test_transposed_windows_are_refused_on_one_rank_too():
    with pytest.raises(ArgumentError, match=r"Cubes: .* got transposed ones"):
        Cubes(Window(3, transposed=True), Window(3))(torch.zeros(1, 1, 5, 5))
