"""torchmn.datasets.cifar10: both official formats, and damaged or malicious files."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from torchmn.datasets import DatasetError, cifar10
from torchmn.errors import ArgumentError

STEMS = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
IMAGES_PER_FILE = 3


def batch(place: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and pixels of one file."""
    draw = np.random.default_rng(place)
    return draw.integers(0, 10, IMAGES_PER_FILE, np.uint8), draw.integers(0, 256, (IMAGES_PER_FILE, 3072), np.uint8)


def pickled_by_python_2(labels: np.ndarray, pixels: np.ndarray) -> bytes:
    """Returns the opcodes that Python 2 and NumPy of that time wrote."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value  # SHORT_BINSTRING, which Python 3 never writes

    rows, columns = (b"M" + struct.pack("<H", extent) for extent in pixels.shape)
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\0K\1\x87R(K\3"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    content = b"T" + struct.pack("<i", pixels.size) + pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
    array += b"(K\1" + rows + columns + b"\x86" + dtype + b"\x89" + content + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\2}(" + text(b"batch_label") + text(b"one") + text(b"labels") + numbers + text(b"data") + array + b"u."


def write_binary(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for place, stem in enumerate(STEMS):
        labels, pixels = batch(place)
        (folder / f"{stem}.bin").write_bytes(np.column_stack([labels, pixels]).tobytes())


def write_python_2(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for place, stem in enumerate(STEMS):
        (folder / stem).write_bytes(pickled_by_python_2(*batch(place)))


def write_python_3(folder: Path) -> None:
    """Writes batches as current versions of Python and NumPy do, in Fortran order."""
    folder.mkdir(exist_ok=True)
    for place, stem in enumerate(STEMS):
        labels, pixels = batch(place)
        content = {"labels": labels.tolist(), "data": np.asfortranarray(pixels)}
        (folder / stem).write_bytes(pickle.dumps(content, protocol=2))


WRITERS = {"binary": write_binary, "python 2": write_python_2, "python 3": write_python_3}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("inside", ["", "folder"])
def test_every_format_gives_the_same_images_and_labels(writer, inside, tmp_path):
    folder = {write_binary: "cifar-10-batches-bin"}.get(writer, "cifar-10-batches-py") if inside else ""
    writer(tmp_path / folder)
    for split, places in (("train", range(5)), ("test", [5])):
        found = cifar10(split, tmp_path)
        labels = np.concatenate([batch(place)[0] for place in places])
        pixels = np.concatenate([batch(place)[1] for place in places]).reshape(-1, 3, 32, 32)
        assert found.labels.tolist() == labels.tolist()
        assert found.images.dtype == torch.float32
        assert torch.equal(found.images, torch.from_numpy(pixels) / 255)
        assert found[1][1] == labels[1]


def test_the_python_2_file_of_these_tests_is_one():
    labels, pixels = batch(0)
    loaded = pickle.loads(pickled_by_python_2(labels, pixels), encoding="bytes")
    assert loaded[b"labels"] == labels.tolist()
    assert (loaded[b"data"] == pixels).all()


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    write_python_3(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps({"labels": [1], "data": Harm()}, protocol=2))
    with pytest.raises(DatasetError, match=r"test_batch: the pickle refers to .*nothing was run"):
        cifar10("test", tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("forbidden", [b"cbuiltins\neval\n(V1\ntR.", b"cnumpy\nload\n(V/etc/passwd\ntR."])
def test_nothing_but_arrays_of_bytes_is_built(forbidden, tmp_path):
    write_python_3(tmp_path)
    (tmp_path / "test_batch").write_bytes(forbidden)
    with pytest.raises(DatasetError, match="nothing was run"):
        cifar10("test", tmp_path)


DAMAGED = {
    "cut off": lambda content: content[:-700],
    "empty": lambda content: b"",
    "a page of HTML": lambda content: b"<html>not found</html>",
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize(("writer", "name"), [(write_binary, "test_batch.bin"), (write_python_2, "test_batch")])
def test_a_damaged_file_is_named(writer, name, damage, tmp_path):
    writer(tmp_path)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(DatasetError, match=name):
        cifar10("test", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"fine_labels": [1]}, "labels"),
        ({"labels": [1, 2], "data": np.zeros((1, 3072), np.uint8)}, r"expected 2 x 3072 pixels .*got 1 x 3072"),
        ({"labels": [1], "data": np.zeros((1, 3072), np.float32)}, "unsigned bytes, got '?f4"),
        ({"labels": [1], "data": "pixels"}, "no array"),
        ({"labels": ["cat"], "data": np.zeros((1, 3072), np.uint8)}, "labels from 0 to 9"),
        ({"labels": [10], "data": np.zeros((1, 3072), np.uint8)}, "labels from 0 to 9, got 10 at position 0"),
        ([1, 2], "got list"),
    ],
)
def test_a_pickle_of_something_else_is_refused(content, message, tmp_path):
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DatasetError, match=message):
        cifar10("test", tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    write_binary(tmp_path)
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(DatasetError, match=r"data_batch_3\.bin is missing"):
        cifar10("train", tmp_path)


def test_an_archive_that_is_not_unpacked_is_named_in_the_error(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"contains: cifar-10-python\.tar\.gz.*Unpack"):
        cifar10("train", tmp_path)
    with pytest.raises(DatasetError, match="not a directory"):
        cifar10("train", tmp_path / "nowhere")


def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="Did you mean 'train'"):
        cifar10("trian", tmp_path)
