"""Data sets as arrays: iris, images in folders, .npz files, synthetic ones, and MNIST and CIFAR as bytes."""

from __future__ import annotations

import gzip
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from tests.datasets.files import write_idx
from torchmn import datasets
from torchmn.datasets import DatasetError, cache, load_cifar10, load_cifar100, load_mnist
from torchmn.errors import ArgumentError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_iris_is_fishers():
    flowers = datasets.iris()
    assert flowers.inputs.shape == (150, 4) and np.bincount(flowers.targets).tolist() == [50, 50, 50]
    means = [flowers.inputs[flowers.targets == k].mean(axis=0) for k in range(3)]
    expected = [[5.006, 3.428, 1.462, 0.246], [5.936, 2.770, 4.260, 1.326], [6.588, 2.974, 5.552, 2.026]]
    np.testing.assert_allclose(means, expected, atol=1e-4)
    assert (len(datasets.iris("train")), len(datasets.iris("test"))) == (120, 30)
    assert np.bincount(datasets.iris("test").targets).tolist() == [10, 10, 10]
    with pytest.raises(ArgumentError, match="Did you mean 'train'"):
        datasets.iris("trian")


def test_bytes_are_taken_as_the_images_that_mnist_gives():
    arrays, images = load_mnist.mnist_arrays("test", None), datasets.mnist("test")
    rows = np.array([5, 0, 999])
    inputs, targets = arrays.take(rows)
    torch.testing.assert_close(inputs, images.images[torch.from_numpy(rows)], rtol=0, atol=1e-7)
    assert targets.tolist() == images.labels[torch.from_numpy(rows)].tolist()
    region, _ = arrays.take(rows, torch.float64, (slice(3, 10), slice(20, 28)))
    torch.testing.assert_close(region, inputs[:, :, 3:10, 20:28].double())


def test_decompressed_files_are_mapped_and_gzipped_ones_cached(tmp_path):
    numbers = np.random.default_rng(0)
    for stem, shape in (("t10k-images-idx3", (7, 28, 28)), ("t10k-labels-idx1", (7,))):
        write_idx(tmp_path / f"{stem}-ubyte.gz", numbers.integers(0, 10, shape, dtype=np.uint8))
    packed = load_mnist.mnist_arrays("test", tmp_path)
    assert isinstance(packed.inputs.base, np.memmap) or isinstance(packed.inputs, np.memmap)
    content = gzip.decompress((tmp_path / "t10k-images-idx3-ubyte.gz").read_bytes())
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(content)
    mapped = load_mnist.mnist_arrays("test", tmp_path)
    assert isinstance(mapped.inputs, np.memmap)
    assert np.array_equal(mapped.inputs, packed.inputs)


def test_the_cache_depends_on_the_content_and_is_never_stale(tmp_path):
    path, made = tmp_path / "file", []

    def read() -> np.ndarray:
        def make() -> np.ndarray:
            made.append(1)
            return np.frombuffer(path.read_bytes(), np.uint8)

        return cache.cached(cache.digest([path], "test"), make)

    path.write_bytes(b"one")
    assert bytes(read()) == b"one" and bytes(read()) == b"one" and len(made) == 1
    path.write_bytes(b"two")
    assert bytes(read()) == b"two" and len(made) == 2
    kept = sorted((cache.user_folder() or tmp_path).joinpath("arrays").glob("*.npy"))
    kept[0].write_bytes(b"damaged")
    kept[1].write_bytes(b"damaged")
    assert bytes(read()) == b"two" and len(made) == 3


def test_without_a_writable_cache_an_array_is_made_each_time(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.cached("key", lambda: np.arange(3)).tolist() == [0, 1, 2]


def records(count: int, labels: int) -> np.ndarray:
    made = np.random.default_rng(count).integers(0, 256, (count, labels + 3072), dtype=np.uint8)
    made[:, :labels] = np.arange(count)[:, None] % 10
    return made


def test_cifar10_as_bytes_is_that_of_the_images(tmp_path):
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        (tmp_path / f"{name}.bin").write_bytes(records(4, 1).tobytes())
    for split, count in (("train", 20), ("test", 4)):
        arrays, images = load_cifar10.cifar10_arrays(split, tmp_path), datasets.cifar10(split, tmp_path)
        inputs, targets = arrays.take(np.arange(count))
        torch.testing.assert_close(inputs, images.images, rtol=0, atol=1e-7)
        assert torch.equal(targets, images.labels) and arrays.shape == (3, 32, 32)


def test_cifar100_of_both_formats_and_both_kinds_of_labels(tmp_path):
    made = records(5, 2)
    made[:, 0], made[:, 1] = [1, 2, 3, 4, 19], [10, 20, 30, 40, 99]
    binary, python = tmp_path / "cifar-100-binary", tmp_path / "other" / "cifar-100-python"
    binary.mkdir()
    python.mkdir(parents=True)
    (binary / "train.bin").write_bytes(made.tobytes())
    batch = {"data": made[:, 2:], "fine_labels": made[:, 1].tolist(), "coarse_labels": made[:, 0].tolist()}
    (python / "train").write_bytes(pickle.dumps(batch, protocol=2))
    for root in (tmp_path, tmp_path / "other"):
        images = datasets.cifar100("train", root)
        assert images.labels.tolist() == [10, 20, 30, 40, 99]
        np.testing.assert_allclose(images.images.flatten(1).numpy() * 255, made[:, 2:], atol=1e-4)
        assert datasets.cifar100("train", root, coarse=True).labels.tolist() == [1, 2, 3, 4, 19]
        assert load_cifar100.cifar100_arrays("train", root).targets.tolist() == [10, 20, 30, 40, 99]
    with pytest.raises(DatasetError, match=r"no test.bin or test in .*Unpack cifar-100-binary"):
        datasets.cifar100("test", tmp_path)
    (binary / "test.bin").write_bytes(b"123")
    with pytest.raises(DatasetError, match="expected records of 3074 bytes, got 3 bytes"):
        datasets.cifar100("test", tmp_path)


def picture(path, value: int, size=(6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 255)).save(path)


def test_images_have_the_class_of_their_folder(tmp_path):
    picture(tmp_path / "cats" / "a.png", 10)
    picture(tmp_path / "dogs" / "b.png", 20)
    picture(tmp_path / "dogs" / "a.PNG", 30)
    (tmp_path / "dogs" / "notes.txt").write_text("no image")
    found = datasets.images(tmp_path)
    assert found.classes == ("cats", "dogs") and found.targets.tolist() == [0, 1, 1]
    assert found.inputs.shape == (3, 3, 4, 6) and found.inputs[:, 0, 0, 0].tolist() == [10, 30, 20]
    assert found.inputs[0, :, 2, 3].tolist() == [10, 0, 255]
    assert datasets.images(tmp_path, size=(2, 3), channels=1).inputs.shape == (3, 1, 2, 3)
    picture(tmp_path / "dogs" / "a.PNG", 40)  # other content under the same name
    assert datasets.images(tmp_path).inputs[:, 0, 0, 0].tolist() == [10, 40, 20]


def test_errors_name_unreadable_images_and_folders(tmp_path):
    with pytest.raises(DatasetError, match="is not a folder"):
        datasets.images(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match="contains no folders"):
        datasets.images(tmp_path)
    (tmp_path / "cats").mkdir()
    with pytest.raises(DatasetError, match="no images in the folders"):
        datasets.images(tmp_path)
    picture(tmp_path / "cats" / "a.png", 1)
    picture(tmp_path / "cats" / "b.png", 1, size=(5, 5))
    with pytest.raises(DatasetError, match=r"b.png: this image is 5 x 5, but a.png is 4 x 6. Pass the size"):
        datasets.images(tmp_path)
    (tmp_path / "cats" / "b.png").write_bytes(b"\x89PNG no")
    with pytest.raises(DatasetError, match=r"b.png: not an image, or a damaged one"):
        datasets.images(tmp_path)
    (tmp_path / "cats" / "b.png").unlink()
    with pytest.raises(DatasetError, match="'cats' is not a class of the training images: dogs"):
        datasets.images(tmp_path, classes=("dogs",))


def test_npz_files_hold_bytes_or_floats_labels_or_values(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x_train=np.full((3, 2), 255, np.uint8), y_train=np.array([[0], [1], [2]]), x_test=np.ones((1, 2)),
             y_test=np.ones((1, 4), np.float32))  # fmt: skip
    train, test = datasets.npz(path), datasets.npz(path, "test")
    assert train is not None and test is not None
    assert train.take(np.array([2]))[0].tolist() == [[1.0, 1.0]] and train.targets.tolist() == [0, 1, 2]
    assert test.take(np.array([0]), torch.float64)[1].tolist() == [[1.0] * 4]
    np.savez(path, x=np.ones((3, 2)), y=np.ones(3))
    assert datasets.npz(path, "test") is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.ones(3)}, "expected arrays x_train and y_train, got: a"),
        ({"x_train": np.ones((3, 2))}, "it has x_train, but no y_train"),
        ({"x": np.ones((3, 2)), "y": np.ones(4)}, r"got shapes \(3, 2\) and \(4,\)"),
        ({"x": np.ones((3, 2)), "y": np.array(1)}, r"got shapes \(3, 2\) and \(\)"),
        ({"x": np.ones(3), "y": np.ones(3)}, "expected inputs of bytes or floats with a first dim"),
        ({"x": np.ones((3, 2)), "y": np.array([0, -1, 2])}, "expected labels 0, 1, 2"),
        ({"x": np.ones((3, 2)), "y": np.array(["a", "b", "c"])}, "expected targets that are integers"),
        ({"x": np.array([[np.nan]]), "y": np.array([0])}, "some inputs are not finite"),
        ({"x": np.array([[object()]]), "y": np.array([0])}, "not a readable .npz file"),
    ],
)
def test_npz_files_with_unsuitable_arrays_raise(arrays, message, tmp_path):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(DatasetError, match=message):
        datasets.npz(tmp_path / "data.npz")


def test_a_file_that_is_not_npz_raises_and_is_not_run(tmp_path):
    (tmp_path / "data.npz").write_bytes(pickle.dumps(print))
    with pytest.raises(DatasetError, match=r"not a readable .npz file"):
        datasets.npz(tmp_path / "data.npz")
    with pytest.raises(DatasetError, match="No such file"):
        datasets.npz(tmp_path / "other.npz")


def test_synthetic_data_depends_on_the_seed_only():
    first, again, other = (datasets.toy_images(count=40, side=16, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.inputs, again.inputs) and not np.array_equal(first.inputs, other.inputs)
    assert first.shape == (1, 16, 16) and set(first.targets.tolist()) == {0, 1, 2, 3}
    drawn = datasets.random((2, 3), count=50, classes=4, seed=3)
    assert drawn.inputs.shape == (50, 2, 3) and 0 <= drawn.inputs.min() <= drawn.inputs.max() < 1
    assert set(drawn.targets.tolist()) == {0, 1, 2, 3}


def test_outlines_are_half_circles_and_half_ellipses_around_the_centre():
    drawn = datasets.ellipses(count=256, seed=3)
    assert drawn.shape == (3, 32, 32) and drawn.classes == ("circle", "ellipse")
    assert np.array_equal(np.bincount(drawn.targets), [128, 128]) and 0 < drawn.targets[:128].sum() < 128
    for image, target in zip(drawn.inputs, drawn.targets, strict=True):
        rows, columns = np.nonzero(image.any(axis=0))
        heights, widths = (16 - rows.min(), rows.max() - 16), (16 - columns.min(), columns.max() - 16)
        assert heights[0] == heights[1] and widths[0] == widths[1]
        assert min(heights[0], widths[0]) >= 4 and max(heights[0], widths[0]) <= 15
        assert (heights[0] == widths[0]) == (target == 0)
        assert all(len(np.unique(channel)) <= 2 for channel in image)
    assert np.array_equal(drawn.inputs, datasets.ellipses(count=256, seed=3).inputs)


def test_a_sample_is_a_share_in_order_chosen_by_the_seed():
    whole = datasets.random((1,), count=200, seed=0)
    some, again, other = whole.sampled(0.1, 5), whole.sampled(0.1, 5), whole.sampled(0.1, 6)
    assert len(some) == 20 and np.array_equal(some.inputs, again.inputs)
    assert not np.array_equal(some.inputs, other.inputs)
    places = [np.flatnonzero(whole.inputs[:, 0] == value)[0] for value in some.inputs[:, 0]]
    assert places == sorted(places) and len(whole.sampled(1e-9, 0)) == 1


def test_the_sample_of_mnist_needs_no_folder():
    assert load_mnist.mnist_arrays("train", None).inputs.shape == (6000, 1, 28, 28)
    with pytest.raises(DatasetError, match="is not a directory"):
        load_mnist.mnist_arrays("train", load_mnist.SAMPLE / "nowhere")


def test_rows_may_be_a_slice_a_mask_or_any_numbers_and_samples_are_copies():
    values = np.arange(24, dtype=np.float64).reshape(6, 4)
    data = datasets.Arrays("numbers", values, np.arange(6), scale=2.0)
    mask = np.array([True, False, True, True, False, False])
    for rows in (slice(1, 4), mask, np.array([1, 2, 3]), np.array([3, 1, 2]), np.array([5]), np.array([], dtype=int)):
        inputs, targets = data.take(rows, torch.float64)
        np.testing.assert_array_equal(inputs.numpy(), 2 * values[rows])
        np.testing.assert_array_equal(targets.numpy(), np.arange(6)[rows])
    np.testing.assert_array_equal(values, np.arange(24).reshape(6, 4))
