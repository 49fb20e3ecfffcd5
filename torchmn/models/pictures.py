"""Rows of small images as one PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from torchmn.errors import TorchMNError


def save_pictures(
    path: Path, rows: Sequence[Tensor], titles: Sequence[str], captions: Sequence[str] | None = None
) -> Path:
    """Write a PNG with a row of pictures for each of `rows`, and give its path.

    rows: (count, map, height, width) each, of equal count; three maps are red, green and blue, others are averaged.
    titles: one per row; captions: one per column. Each picture spans black to white.
    """
    try:
        from matplotlib.figure import Figure  # not a dependency of training
    except ImportError as error:
        raise TorchMNError("pictures need matplotlib: pip install matplotlib") from error
    columns = len(rows[0])
    figure = Figure(figsize=(1.2 * columns + 0.8, 1.4 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for row, images in enumerate(rows):
        for column, image in enumerate(images.detach().cpu().float()):
            cell = axes[row][column]
            cell.imshow(_picture(image), cmap="gray", vmin=0, vmax=1)
            cell.set_xticks([])
            cell.set_yticks([])
            if captions and row == 0:
                cell.set_title(captions[column], fontsize=7)
        axes[row][0].set_ylabel(titles[row], fontsize=8)
    figure.savefig(path, dpi=100)
    return path


def _picture(image: Tensor):
    """(height, width) or (height, width, 3), from 0 to 1."""
    shown = image.permute(1, 2, 0) if len(image) == 3 else image.mean(0)
    low, high = shown.min(), shown.max()
    return ((shown - low) / (high - low if high > low else 1.0)).numpy()
