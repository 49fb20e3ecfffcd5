"""visualize: pictures of a sparse autoencoder's reconstructions, and of the stimuli that excite a unit most."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchmn.errors import ArgumentError, TorchMNError
from torchmn.models.sparse_autoencoder.best_units import Unit
from torchmn.models.sparse_autoencoder.model import SparseAutoencoder


def visualize(
    model: SparseAutoencoder,
    images: Tensor,
    directory: str | Path,
    units: Sequence[Unit] = (),
    *,
    steps: int = 100,
) -> list[Path]:
    """Writes `reconstructions.png`, and with `units` also `stimuli.png`, into `directory`.

    For a plain model on one rank. Of a parallel model, load `torchmn.full_state_dict(model)` into a plain one first.

    Args:
        model: the network.
        images: (count, in_maps, *in_size), to be reconstructed, and the starting points of the search for stimuli.
        directory: is created if it does not exist.
        units: (map, row, column) of top units, such as those that `spot_check` finds.
        steps: of the search for stimuli.

    Returns:
        The paths of the files.

    Raises:
        ArgumentError: if the model is parallel, or a unit does not exist.
        TorchMNError: if matplotlib is not installed.
    """
    _check_plain(model)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        reconstructions = model.stacks[0].reconstruct(images)
    titles = ["image", "reconstruction"]
    written = [save_pictures(directory / "reconstructions.png", [images, reconstructions], titles)]
    if units:
        stimuli, values = optimal_stimuli(model, images, units, steps=steps)
        captions = [f"{unit}: {value:.3g}" for unit, value in zip(units, values.tolist(), strict=True)]
        written.append(save_pictures(directory / "stimuli.png", [stimuli], ["stimulus"], captions))
    return written


def optimal_stimuli(
    model: SparseAutoencoder, images: Tensor, units: Sequence[Unit], *, steps: int = 100
) -> tuple[Tensor, Tensor]:
    """Returns for each top unit an image of L2 norm 1 that excites it strongly, and the value of the unit.

    Gradient ascent on the sphere of norm 1, from the image that excites the unit most: a step that does not increase
    the value is undone and halved, so the result is never worse than the start.

    Args:
        model: the network, not parallel.
        images: (count, in_maps, *in_size), from which to start.
        units: (map, row, column) of top units.
        steps: of the ascent.

    Returns:
        (units, in_maps, *in_size), and (units,).

    Raises:
        ArgumentError: if the model is parallel, a unit does not exist, or all images are zero.
    """
    _check_plain(model)
    numbers = torch.tensor([_number(model, unit) for unit in units], device=images.device)
    candidates = _on_sphere(images[images.flatten(1).norm(dim=1) > 0])
    if not len(candidates):
        raise ArgumentError("optimal_stimuli: expected at least one image that is not all zeros to start from")
    with torch.no_grad():
        x = candidates[model.features(candidates).flatten(1)[:, numbers].argmax(0)]
    values, uphill = _climb(model, x, numbers)
    step = torch.full_like(values, 0.5)
    for _ in range(steps):
        tried = _on_sphere(x + step.view(-1, 1, 1, 1) * uphill)
        new_values, new_uphill = _climb(model, tried, numbers)
        better = new_values > values
        chosen = better.view(-1, 1, 1, 1)
        x, uphill = torch.where(chosen, tried, x), torch.where(chosen, new_uphill, uphill)
        values, step = torch.where(better, new_values, values), torch.where(better, step * 1.2, step / 2)
    return x, values


def _climb(model: SparseAutoencoder, x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the value of each unit for its image, and its gradient, scaled to norm 1."""
    x = x.detach().requires_grad_()
    values = model.features(x).flatten(1).gather(1, numbers.view(-1, 1)).squeeze(1)
    (gradient,) = torch.autograd.grad(values.sum(), x)
    return values.detach(), _on_sphere(gradient)


def _on_sphere(x: Tensor) -> Tensor:
    norm = x.flatten(1).norm(dim=1)
    return x / torch.where(norm == 0, 1.0, norm).view(-1, 1, 1, 1)


def _number(model: SparseAutoencoder, unit: Unit) -> int:
    """Returns the index of a unit in the flattened features."""
    _, rows, columns = model.feature_shape
    if len(unit) != 3 or not all(0 <= at < extent for at, extent in zip(unit, model.feature_shape, strict=True)):
        shape = model.feature_shape
        raise ArgumentError(f"optimal_stimuli: expected a unit (map, row, column) below {shape}, got {tuple(unit)}")
    return (unit[0] * rows + unit[1]) * columns + unit[2]


def _check_plain(model: SparseAutoencoder) -> None:
    if hasattr(model, "parallelism"):
        raise ArgumentError(
            "visualize: expected a plain model, got a parallel one: load torchmn.full_state_dict(model), which all "
            "ranks must call, into a new SparseAutoencoder on one of them"
        )


def save_pictures(
    path: Path, rows: Sequence[Tensor], titles: Sequence[str], captions: Sequence[str] | None = None
) -> Path:
    """Writes a PNG with a row of pictures for each of `rows`, and returns its path.

    Args:
        path: of the file.
        rows: (count, map, height, width) each, of equal count. Three maps are red, green and blue; others are averaged.
            Each picture is scaled from black to white.
        titles: one per row.
        captions: one per column.

    Returns:
        The path of the file.

    Raises:
        TorchMNError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # an optional dependency
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
    """Returns (height, width) or (height, width, 3), scaled from 0 to 1."""
    shown = image.permute(1, 2, 0) if len(image) == 3 else image.mean(0)
    low, high = shown.min(), shown.max()
    return ((shown - low) / (high - low if high > low else 1.0)).numpy()
