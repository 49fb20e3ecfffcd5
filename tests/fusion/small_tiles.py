"""Fixtures of the tests of wide halos: a small image, its tiles, and limits that allow wide halos on them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from torchmn import ProcessGrid
from torchmn.geometry import owned
from torchmn.sharded.fusion import wide_halo

IMAGE = (2, 2, 23, 20)


def let_small_tiles_have_wide_halos(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small images, which are quick, show what large ones do."""
    monkeypatch.setattr(wide_halo, "LARGEST_SHARE", 1.0)
    monkeypatch.setattr(wide_halo, "MOST_ROWS", 6)


def conv(channels: int, out: int, kernel: Any = 3, **settings: Any) -> nn.Module:
    return nn.Conv2d(channels, out, kernel, padding=settings.pop("padding", "same"), **settings)


def tile_of(x: Tensor, grid: ProcessGrid) -> Tensor:
    """This rank's rows and columns of a whole image."""
    rows = owned(x.shape[2], grid.sizes["height"], grid.place["height"])
    columns = owned(x.shape[3], grid.sizes["width"], grid.place["width"])
    return x[:, :, rows.as_slice(), columns.as_slice()]
