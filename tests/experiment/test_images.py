"""The data set `images`: what is subtracted from pixels, by what they are divided, and how many are used."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from tests.experiment.running import experiment, load_data, train
from torchmn.errors import ExperimentError

TEXT = """
dataset: {name: images, size: [8, 8], channels: 1, validation: 25%}
model: {layers: [{conv: {maps: 2, kernel: 3}}, {linear: 2}], cost: cross_entropy}
optimizer: {name: sgd, lr: 1.0e-4}
epochs: 1
batch_size: 4
dtype: float64
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    numbers = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(8):
            pixels = numbers.integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{k}.png")
    return str(tmp_path / "images")


def splits_of(folder: str, *changes: str) -> dict:
    return load_data(experiment(TEXT, *changes), folder)


def test_pixels_are_between_0_and_1_unless_the_file_changes_that(folder):
    rows = np.arange(4)
    taken = splits_of(folder)["train"].take(rows, torch.float64)[0] * 255
    shifted = splits_of(folder, "dataset.subtract=127", "dataset.divide=2")["train"].take(rows, torch.float64)[0]
    torch.testing.assert_close(shifted, (taken - 127) / 2, rtol=0, atol=1e-4)


def test_the_mean_training_image_is_subtracted_from_all_splits(folder):
    plain = splits_of(folder, "dataset.divide=1")
    centred = splits_of(folder, "dataset.divide=1", "dataset.subtract=mean")
    everything = {name: arrays.take(np.arange(len(arrays)), torch.float64)[0] for name, arrays in plain.items()}
    mean = everything["train"].mean(dim=0)
    for name, arrays in centred.items():
        images = arrays.take(np.arange(len(arrays)), torch.float64)[0]
        torch.testing.assert_close(images, everything[name] - mean, rtol=0, atol=1e-4)
    region = (slice(2, 5), slice(1, 8))
    tile = centred["train"].take(np.arange(3), torch.float64, region)[0]
    torch.testing.assert_close(tile, (everything["train"] - mean)[:3, :, 2:5, 1:8], rtol=0, atol=1e-4)


def test_at_most_the_first_images_are_trained_on(folder):
    assert {name: len(arrays) for name, arrays in splits_of(folder, "dataset.first=5").items()} == {
        "train": 5,
        "validation": 4,
    }
    assert len(splits_of(folder, "dataset.first=100")["train"]) == 12


def test_tiles_have_the_numbers_of_one_rank(folder):
    chosen = experiment(TEXT, "dataset.subtract=mean", "dataset.divide=128")
    alone = train(chosen, data=folder)
    for ranks, mode in ((2, "datapar"), (4, "halopar")):
        assert train(chosen, ranks, mode, data=folder).losses == pytest.approx(alone.losses, rel=1e-9)


def test_a_wrong_subtrahend_is_an_error():
    with pytest.raises(ExperimentError, match="expected images's subtract to be a number, or `mean`, got 'median'"):
        experiment(TEXT, "dataset.subtract=median")
