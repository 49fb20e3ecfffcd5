"""Synthetic data sets for tests and first steps: random numbers, and images of shapes."""

from __future__ import annotations

import numpy as np

from torchmn.datasets.arrays import Arrays

SHAPES = ("circle", "square", "cross", "stripes")
OUTLINES = ("circle", "ellipse")


def random(shape: tuple[int, ...], *, count: int = 1000, classes: int = 10, seed: int = 0) -> Arrays:
    """Returns uniformly distributed inputs in [0, 1) and labels, of any shape, with nothing to learn.

    Args:
        shape: of one sample.
        count: number of samples.
        classes: number of labels.
        seed: of the random numbers.

    Returns:
        Inputs (count, *shape), float32, and labels (count,) from 0 to classes - 1.
    """
    numbers = np.random.default_rng(seed)
    inputs = numbers.random((count, *shape), dtype=np.float32)
    return Arrays("random", inputs, numbers.integers(0, classes, count))


def ellipses(*, count: int = 256, side: int = 32, seed: int = 0) -> Arrays:
    """Returns colour images of circles and ellipses around the centre, half of each, in random order.

    Radii are between an eighth and a half of the side, and those of an ellipse differ. Outlines are on black, with a
    random intensity in each channel, as in neon's `ToyImages`.

    Args:
        count: number of images.
        side: height and width of an image.
        seed: of the random numbers.

    Returns:
        Inputs (count, 3, side, side), bytes, and labels (count,), indices into `OUTLINES`.
    """
    numbers = np.random.default_rng(seed)
    targets = numbers.permutation(np.arange(count) >= count // 2).astype(np.int64)
    smallest, choices = side // 8, side // 2 - side // 8
    first = numbers.integers(0, choices, count)
    # Equal to `first` for a circle, different for an ellipse.
    other = (first + targets * numbers.integers(1, choices, count)) % choices
    turn = np.linspace(0, 2 * np.pi, 32 * side + 1)  # several points for each pixel of the longest outline
    rows = side // 2 + np.trunc((smallest + first)[:, None] * np.cos(turn)).astype(np.int64)
    columns = side // 2 + np.trunc((smallest + other)[:, None] * np.sin(turn)).astype(np.int64)
    pixels = np.zeros((count, 3, side, side), np.uint8)
    greys = numbers.integers(0, 256, (count, 3), dtype=np.uint8)
    pixels[np.arange(count)[:, None], :, rows, columns] = greys[:, None, :]
    return Arrays("ellipses", pixels, targets, 1 / 255, OUTLINES)


def toy_images(*, count: int = 1000, side: int = 32, seed: int = 0) -> Arrays:
    """Returns grey images of a circle, a square, a cross or stripes at a random position, with noise: easy to learn.

    Args:
        count: number of images.
        side: height and width of an image.
        seed: of the random numbers.

    Returns:
        Inputs (count, 1, side, side), bytes, and labels (count,), indices into `SHAPES`.
    """
    numbers = np.random.default_rng(seed)
    targets = numbers.integers(0, len(SHAPES), count)
    radius = numbers.uniform(side / 6, side / 4, (count, 1, 1))
    centre = numbers.uniform(side / 4, side * 3 / 4, (2, count, 1, 1))
    rows, columns = np.mgrid[:side, :side]
    y, x = np.abs(rows - centre[0]), np.abs(columns - centre[1])
    inside = (x <= radius) & (y <= radius)
    drawn = np.choose(
        targets[:, None, None],
        [x**2 + y**2 <= radius**2, inside, inside & (np.minimum(x, y) <= side / 20), inside & (y % 4 < 2)],
    )
    noise = numbers.uniform(0, 60, drawn.shape)
    pixels = np.where(drawn, 255 - noise, noise).astype(np.uint8)
    return Arrays("toy_images", pixels[:, None], targets.astype(np.int64), 1 / 255, SHAPES)
