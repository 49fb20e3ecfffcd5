"""examples/unet_large_image.py: the same losses on one rank and on tiles, and a picture with their borders."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.examples.running import epochs, run_example


def test_tiles_train_as_the_whole_image_and_are_drawn(tmp_path):
    run_example("unet_large_image.py", "alone", tmp_path / "one")
    result = run_example("unet_large_image.py", "mpiexec", tmp_path / "two")
    assert "2x1 tiles" in result.stdout
    one, two = epochs(tmp_path / "one")["loss"], epochs(tmp_path / "two")["loss"]
    assert two == pytest.approx(one, rel=1e-4)
    assert 0.1 < one[0] < 0.69  # less than a coin's
    assert not has_colour(tmp_path / "one" / "unet.png")
    assert has_colour(tmp_path / "two" / "unet.png"), "no border of tiles in the picture"


def has_colour(path: Path) -> bool:
    """Whether a picture has anything in it that is not grey: the borders of tiles are orange."""
    picture = imread(path)
    return bool((picture[..., 0] - picture[..., 2] > 0.3).any())
