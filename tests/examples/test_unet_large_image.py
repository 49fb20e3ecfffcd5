"""examples/unet_large_image.py: the same losses on one rank and on tiles, and a picture with their borders."""

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
    picture = imread(tmp_path / "two" / "unet.png")
    orange = (abs(picture[..., :3] - (1.0, 0.498, 0.055)) < 0.02).all(-1)
    assert orange.any(1).sum() >= 1, "no border of tiles in the picture"
    assert not (abs(imread(tmp_path / "one" / "unet.png")[..., :3] - (1.0, 0.498, 0.055)) < 0.02).all(-1).any()
