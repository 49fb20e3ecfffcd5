"""torchmn.datasets.mnist: the sample, and a directory of IDX files."""

import gzip
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.datasets.files import SAMPLE, write_idx
from torchmn.datasets import DatasetError, mnist
from torchmn.errors import ArgumentError

IMAGES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}


@pytest.mark.parametrize(("split", "per_class"), [("train", 600), ("test", 100)])
def test_the_sample_has_every_digit_equally_often(split, per_class):
    sample = mnist(split)
    assert len(sample) == 10 * per_class
    assert torch.bincount(sample.labels).tolist() == [per_class] * 10


def test_images_are_float32_between_0_and_1_and_labels_are_ints():
    image, label = mnist("test")[3]
    assert image.shape == (1, 28, 28)
    assert image.dtype == torch.float32
    assert type(label) is int
    images = mnist("test").images
    assert (images.min(), images.max()) == (0, 1)


def test_no_test_image_is_among_the_training_images():
    def digests(split: str) -> set[str]:
        return {hashlib.sha256(image.numpy().tobytes()).hexdigest() for image in mnist(split).images}

    assert not digests("train") & digests("test")


def test_the_sample_holds_digits_that_their_labels_name():
    """The nearest class mean classifies most test digits, which it could not if labels were mixed up."""
    train, test = mnist("train"), mnist("test")
    means = torch.stack([train.images[train.labels == digit].mean(0) for digit in range(10)])
    guesses = torch.cdist(test.images.flatten(1), means.flatten(1)).argmin(1)
    assert (guesses == test.labels).double().mean() > 0.75


def test_a_data_loader_takes_it():
    images, labels = next(iter(DataLoader(mnist("test"), batch_size=7)))
    assert images.shape == (7, 1, 28, 28)
    assert labels.tolist() == mnist("test").labels[:7].tolist()


def test_the_end_of_the_dataset_ends_iteration():
    sample = mnist("test")
    with pytest.raises(IndexError):
        sample[1000]
    assert sample[-1][1] == sample[999][1]


@pytest.mark.parametrize(
    ("split", "offer"),
    [("tain", "'train'"), ("Test", "'test'"), ("xyz", "test, train"), (["train"], "train")],
)
def test_an_unknown_split_is_refused_with_the_nearest_valid_name(split, offer):
    with pytest.raises(ArgumentError, match=offer):
        mnist(split)


def keep_as(spelling: str, folder: Path) -> None:
    """Copies the sample's test split to `folder`, under other names, gzipped or not."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (IMAGES["test"], LABELS["test"]):
        content = (SAMPLE / f"{name}.gz").read_bytes()
        new_name = name.replace("-idx", ".idx") if spelling.startswith("dotted") else name
        if spelling.endswith("gz"):
            (folder / f"{new_name}.gz").write_bytes(content)
        else:
            (folder / new_name).write_bytes(gzip.decompress(content))


@pytest.mark.parametrize("spelling", ["dashed", "dashed gz", "dotted", "dotted gz"])
@pytest.mark.parametrize("folder", [".", "raw", "MNIST/raw"])
def test_files_are_found_under_all_usual_names(tmp_path, spelling, folder):
    keep_as(spelling, tmp_path / folder)
    dataset = mnist("test", tmp_path)
    assert torch.equal(dataset.images, mnist("test").images)
    assert torch.equal(dataset.labels, mnist("test").labels)


def test_pixels_are_scaled_by_255_and_stay_in_place(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    write_idx(tmp_path / IMAGES["train"], pixels)
    write_idx(tmp_path / LABELS["train"], np.array([9, 0, 4], np.uint8))
    dataset = mnist("train", tmp_path)
    np.testing.assert_allclose(dataset.images.numpy()[:, 0], pixels / 255, rtol=1e-6)
    assert dataset.labels.tolist() == [9, 0, 4]


def refused(root: Path, split: str = "test") -> str:
    with pytest.raises(DatasetError) as caught:
        mnist(split, root)
    return str(caught.value)


def test_a_missing_file_is_refused_with_what_was_looked_for_and_what_is_there(tmp_path):
    (tmp_path / "holiday.jpg").touch()
    message = refused(tmp_path)
    assert "t10k-images-idx3-ubyte.gz" in message
    assert "holiday.jpg" in message
    assert "download=True" in message


def test_a_root_that_is_not_a_directory_is_refused(tmp_path):
    assert "not a directory" in refused(tmp_path / "absent")


def test_other_numbers_of_images_and_labels_are_refused_with_both(tmp_path):
    keep_as("dashed", tmp_path)
    write_idx(tmp_path / LABELS["test"], np.zeros(999, np.uint8))
    message = refused(tmp_path)
    assert "1000 images" in message
    assert "999 labels" in message


def test_a_label_above_9_is_refused_with_its_place(tmp_path):
    write_idx(tmp_path / IMAGES["test"], np.zeros((3, 28, 28), np.uint8))
    write_idx(tmp_path / LABELS["test"], np.array([0, 26, 9], np.uint8))
    assert "from 0 to 9, got 26 at position 1" in refused(tmp_path)


def test_images_of_another_size_are_refused(tmp_path):
    write_idx(tmp_path / IMAGES["test"], np.zeros((2, 32, 32), np.uint8))
    write_idx(tmp_path / LABELS["test"], np.zeros(2, np.uint8))
    assert "expected images of 28 x 28, got 32 x 32" in refused(tmp_path)


def test_images_and_labels_swapped_are_refused(tmp_path):
    shutil.copy(SAMPLE / f"{LABELS['test']}.gz", tmp_path / IMAGES["test"])
    shutil.copy(SAMPLE / f"{IMAGES['test']}.gz", tmp_path / LABELS["test"])
    assert "Is this the right file?" in refused(tmp_path)
