"""Pictures are written, and a stimulus excites its unit more than its starting point."""

from __future__ import annotations

import pytest
import torch
from matplotlib.image import imread
from torch.testing import assert_close

from tests.models.small import small_images, small_model
from torchmn.errors import ArgumentError
from torchmn.models import optimal_stimuli, visualize

UNITS = [(0, 0, 0), (2, 3, 1), (1, 2, 2)]


def test_a_stimulus_has_norm_1_and_excites_its_unit_more_than_any_image_given():
    model, images = small_model(), small_images(5)
    stimuli, values = optimal_stimuli(model, images, UNITS, steps=30)
    assert_close(stimuli.flatten(1).norm(dim=1), torch.ones(3, dtype=torch.float64))
    normalised = images / images.flatten(1).norm(dim=1)[:, None, None, None]
    features = model.features(normalised).detach()
    for stimulus, value, unit in zip(stimuli, values, UNITS, strict=True):
        assert_close(model.features(stimulus[None])[(0, *unit)].detach(), value)
        assert value > features[(slice(None), *unit)].max() + 0.1


def test_more_steps_are_never_worse():
    model, images = small_model(), small_images(5)
    values = [optimal_stimuli(model, images, UNITS, steps=steps)[1] for steps in (0, 5, 20)]
    assert (values[0] <= values[1]).all() and (values[1] <= values[2]).all()


@pytest.mark.parametrize("in_maps", [1, 2, 3])
def test_pictures_are_written_as_png(tmp_path, in_maps):
    model = small_model(in_maps=in_maps)
    images = small_images(4).expand(-1, in_maps, -1, -1)
    written = visualize(model, images, tmp_path / "deep" / "er", UNITS, steps=2)
    assert [path.name for path in written] == ["reconstructions.png", "stimuli.png"]
    for path in written:
        picture = imread(path)
        assert picture.ndim == 3 and picture[..., :3].std() > 0.05


def test_a_unit_that_does_not_exist_and_images_of_nothing_are_named():
    model = small_model()
    with pytest.raises(ArgumentError, match=r"expected a unit \(map, row, column\) below \(3, 5, 4\), got \(3, 0, 0\)"):
        optimal_stimuli(model, small_images(), [(3, 0, 0)])
    with pytest.raises(ArgumentError, match="at least one image that is not all zeros"):
        optimal_stimuli(model, torch.zeros(2, 1, 10, 9, dtype=torch.float64), [(0, 0, 0)])
