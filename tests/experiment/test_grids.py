"""Which grids modes take: integers only."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import numpy as np
import pytest

from tests.experiment.files import BASE
from tests.experiment.running import GridError, description, experiment, grid_for, json_schema, load_data
from torchmn.errors import ExperimentError
from torchmn.modes import MODES, NAMES

IMAGE = (1, 28, 28)


@pytest.mark.parametrize(
    ("mode", "size", "shape", "given", "expected"),
    [
        ("datapar", 5, IMAGE, {}, "5 (data)"),
        ("modelpar", 6, IMAGE, {}, "6 (vectors)"),
        ("hybrid", 6, (4,), {}, "2 x 3 (data x vectors)"),
        ("hybrid", 6, (4,), {"data": 3, "width": 2}, "3 x 2 (data x vectors)"),
        ("halopar", 4, IMAGE, {}, "2 x 2 (height x width)"),
        ("halopar", 6, IMAGE, {"height": 6}, "6 (height)"),
        ("halopar", 3, (2, 50), {}, "3 (width)"),
        ("halopar", 8, (1, 9, 9, 9), {"depth": 2, "height": 2, "width": 2}, "2 x 2 x 2 (depth x height x width)"),
        ("halodatapar", 8, IMAGE, {}, "2 x 2 x 2 (data x height x width)"),
        ("halodatapar", 12, IMAGE, {"height": 2, "width": 2}, "3 x 2 x 2 (data x height x width)"),
    ],
)
def test_a_grid_is_as_given_or_as_square_as_possible(mode, size, shape, given, expected):
    sizes = grid_for(mode, size, shape, given)
    assert description(sizes, mode) == expected and prod(sizes.values()) == size


@pytest.mark.parametrize(
    ("mode", "size", "shape", "given", "message"),
    [
        ("halopar", 2, (4,), {}, "halopar needs images, got samples of shape (4,)"),
        ("halodatapar", 5, IMAGE, {}, "needs a number of ranks that is a product, such as 4 = 2 x 2, got 5"),
        ("halopar", 4, IMAGE, {"height": 3}, "a grid of height 3 has 3 ranks, and there are 4"),
        ("halopar", 4, IMAGE, {"data": 4}, "halopar has no axis data here, only height and width"),
        ("halopar", 2, (2, 50), {"height": 2}, "halopar has no axis height here"),
        ("datapar", 2, IMAGE, {"width": 2}, "only data; use --modelpar or --halopar or --halodatapar"),
        ("datapar", 2, (4,), {"width": 2}, "use --modelpar or --datapar --modelpar"),
        ("halopar", 30, IMAGE, {"width": 30}, "30 ranks along width cannot share 28 rows"),
    ],
)
def test_an_impossible_grid_is_an_error(mode, size, shape, given, message):
    with pytest.raises(GridError, match=re.escape(message)):
        grid_for(mode, size, shape, given)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x_test": np.ones((2, 4)), "y_test": np.array([0, 1])}, "the test samples are 4, and the training samples 3"),
        (
            {"x_test": np.ones((2, 3)), "y_test": np.array([0, 5])},
            "the test samples have the label 5, and the training",
        ),
        ({"x_test": np.ones((2, 3)), "y_test": np.ones(2)}, "the test targets differ from the training targets"),
    ],
)
def test_splits_that_do_not_fit_are_an_error_with_the_line_of_the_data_set(arrays, message, tmp_path):
    np.savez(tmp_path / "x.npz", x_train=np.ones((3, 3)), y_train=np.array([0, 1, 2]), **arrays)
    text = "\nmodel: {layers: [linear: 3], cost: cross_entropy}\noptimizer: adam\nepochs: 1\nbatch_size: 2\n"
    chosen = experiment(f"dataset: {{name: npz, path: {tmp_path}/x.npz}}{text}")
    with pytest.raises(ExperimentError, match=message) as error:
        load_data(chosen, None)
    assert str(error.value).startswith("x.yaml:1:10: ")


def test_schema_and_documentation_have_every_mode():
    schema = json_schema()["$defs"]["Parallel"]["properties"]["mode"]
    assert schema["anyOf"][0]["enum"] == list(NAMES)
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    assert re.findall(r"^\| `(--[^`]*)` \|", page, re.M) == [mode.flag for mode in MODES.values()]


@pytest.mark.parametrize(
    "dataset",
    ["mnist", "{name: random, shape: [2, 9]}", "{name: ellipses, side: 18}", "{name: toy_images, side: 9}"],
)
def test_a_shape_known_in_advance_is_that_of_the_data(dataset):
    chosen = experiment(BASE, f"dataset={dataset}")
    assert chosen.dataset.known_shape(None) == load_data(chosen, None)["train"].shape
