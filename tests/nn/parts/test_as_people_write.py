"""What people write in a forward: it gives one rank's numbers on tiles and in slices, or it is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests.nn.parts.parity import assert_parity
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ParallelizeError
from torchmn.parallel import parallelize

IMAGE = (2, 3, 9, 8)


class Behind(nn.Module):
    """A function behind a convolution, whose output is cut: into tiles, or by channels."""

    def __init__(self, function: Callable[[Tensor], Any]):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, padding=1), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.conv(x))


WEIGHTS: dict[str, Callable[[Tensor], Any]] = {
    "a template": lambda x: F.conv2d(x.reshape(1, 8, 9, 8), x[:, :, 2:5, 3:6], groups=2),
    "a dynamic filter": lambda x: F.conv2d(x, F.adaptive_avg_pool2d(x, 3).mean(0).unsqueeze(1), padding=1, groups=4),
    "a transposed filter": lambda x: F.conv_transpose2d(x, x[0, :, :3, :3].unsqueeze(1), stride=2),
    "a filter of a whole image": lambda x: F.conv2d(x.new_ones(1, 4, 5, 5), x[:, :, :3, :3]),
    "a matrix": lambda x: F.linear(x.permute(0, 2, 3, 1), x.mean((0, 2, 3)).view(1, 4)),
    "pairs of channels": lambda x: x.unsqueeze(1) * x.unsqueeze(2),
}


@pytest.mark.parametrize(("mode", "grid"), [("halopar", (2, 2)), ("modelpar", (1, 3))])
@pytest.mark.parametrize("function", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_are_computed_from_the_image(function, mode, grid):
    assert_parity(Behind(function), IMAGE, grid, mode=mode)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "pairs of rows": (lambda x: x.unsqueeze(2) * x.unsqueeze(3), "side by side"),
}


@pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_wrong_is_refused(function, words):
    def body(comm):
        with pytest.raises(ParallelizeError, match=words):
            parallelize(Behind(function), ProcessGrid(comm, height=2, width=2), "halopar", input_shape=IMAGE[1:])

    torchmn.run_threads(body, 4)
