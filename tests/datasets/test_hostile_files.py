"""Files that are damaged, endless, or announce more than they have raise a DatasetError that names them, at once."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.datasets.files import mnist_arrays, read_idx, read_matlab
from tests.datasets.test_other_files import element, matlab
from torchmn import datasets
from torchmn.datasets import DatasetError

pytestmark = pytest.mark.timeout(60)
HUGE = 1 << 31


def class_folder(folder: Path) -> Path:
    (folder / "cats").mkdir()
    return folder / "cats" / "a.png"


READERS = {
    "idx": ("images", lambda path: read_idx(path, 3)),
    "mat": ("IMAGES.mat", read_matlab),
    "npz": ("data.npz", datasets.npz),
    "housing": ("housing.data", datasets.housing),
    "text": ("book.txt", datasets.text),
    "image": ("cats/a.png", lambda path: datasets.images(path.parent.parent)),
    "cifar10": ("test_batch.bin", lambda path: datasets.cifar10("test", path.parent)),
    "cifar10 pickle": ("test_batch", lambda path: datasets.cifar10("test", path.parent)),
    "cifar100": ("test.bin", lambda path: datasets.cifar100("test", path.parent)),
}


@pytest.fixture(params=READERS)
def reader(request, tmp_path):
    """The path of a file, and the function that reads it."""
    name, read = READERS[request.param]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    return path, read


def problem(read, path: Path) -> str:
    with pytest.raises(DatasetError) as caught:
        read(path)
    assert str(path) in str(caught.value) or str(path.parent) in str(caught.value)
    return str(caught.value)


def test_a_pipe_is_not_waited_for(reader):
    path, read = reader
    os.mkfifo(path)
    problem(read, path)


def test_a_directory_a_dangling_link_and_a_device_are_errors(reader):
    path, read = reader
    path.symlink_to("nowhere")
    problem(read, path)
    path.unlink()
    path.symlink_to("/dev/zero")
    problem(read, path)
    path.unlink()
    if path.suffix not in (".txt", ".data"):  # those readers look for their file in it
        path.mkdir()
        problem(read, path)


def test_a_file_with_a_size_beyond_the_memory_of_the_machine_is_an_error(reader):
    path, read = reader
    with path.open("wb") as file:
        file.truncate(3073 * 3074 << 19)  # without content; records of both kinds fit
    problem(read, path)


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "real").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6]))
    (tmp_path / "labels").symlink_to("real")
    assert read_idx(tmp_path / "labels", 1).tolist() == [5, 6]


@pytest.mark.parametrize("shape", [(0, 28, 28), (0, HUGE, HUGE), (HUGE, HUGE, 0), (HUGE, HUGE, HUGE)])
@pytest.mark.parametrize("packed", [False, True])
def test_images_of_idx_without_values_or_with_too_many_are_an_error(shape, packed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    header, labels = struct.pack(">4B3I", 0, 0, 8, 3, *shape), bytes([0, 0, 8, 1, 0, 0, 0, 0])
    for stem, content in (("t10k-images-idx3-ubyte", header), ("t10k-labels-idx1-ubyte", labels)):
        (tmp_path / stem).write_bytes(gzip.compress(content) if packed else content)
    for read in (lambda path: mnist_arrays("test", path.parent), lambda path: datasets.mnist("test", path.parent)):
        problem(read, tmp_path / "t10k-images-idx3-ubyte")


def test_gzip_is_unpacked_as_far_as_its_content_announces(tmp_path):
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6]) + bytes(1 << 24)))
    assert "expected 2 = 2 bytes after the header, got more" in problem(lambda path: read_idx(path, 1), path)


def compressed_matlab(announced: int, content: bytes) -> bytes:
    packed = zlib.compress(struct.pack("<II", 14, announced) + content)
    return matlab("x", np.ones(1))[:128] + struct.pack("<II", 15, len(packed)) + packed


def test_an_array_of_matlab_that_unpacks_to_more_than_photographs_is_not_unpacked(tmp_path):
    path = tmp_path / "x.mat"
    path.write_bytes(compressed_matlab(300_000_000, bytes(1 << 20)))
    assert "unpacks to 300000000 bytes: expected at most" in problem(read_matlab, path)


def test_nested_arrays_of_matlab_are_not_followed(tmp_path):
    nested = matlab("x", np.ones(3), compressed=True)[128:]
    for _ in range(200):
        nested = struct.pack("<II", 15, len(zlib.compress(nested))) + zlib.compress(nested)
    (tmp_path / "x.mat").write_bytes(matlab("x", np.ones(1))[:128] + nested)
    assert read_matlab(tmp_path / "x.mat") == {}


@pytest.mark.parametrize("dims", [[-1, -3], [1] * 40, [2**31 - 1] * 1_000_000, [3, 0]])
def test_dims_of_matlab_that_no_array_has_are_an_error(dims, tmp_path):
    body = element(6, bytes(8)) + element(5, np.array(dims, "<i4").tobytes()) + element(1, b"x") + element(9, bytes(24))
    (tmp_path / "x.mat").write_bytes(matlab("x", np.ones(1))[:128] + element(14, body))
    assert "damaged MATLAB file" in problem(read_matlab, tmp_path / "x.mat")


def npz_with(path: Path, header: dict | bytes, content: bytes = b"", method: int = zipfile.ZIP_DEFLATED) -> Path:
    """Writes x_train with this header, and good labels."""
    target, labels = io.BytesIO(), io.BytesIO()
    if isinstance(header, dict):
        np.lib.format.write_array_header_1_0(target, header)
    else:
        target.write(header)
    np.save(labels, np.zeros(4, np.int64))
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x_train.npy", target.getvalue() + content)
        archive.writestr("y_train.npy", labels.getvalue())
    return path


GOOD = {"descr": "<f4", "fortran_order": False, "shape": (4, 2)}


@pytest.mark.parametrize(
    "header",
    [
        GOOD | {"shape": (1 << 40, 2)}, GOOD | {"shape": (4, -2)}, GOOD | {"shape": (-4, -2)},
        GOOD | {"shape": (0, 1 << 62, 1 << 62)}, GOOD | {"shape": (1,) * 70}, GOOD | {"descr": "|O"},
        GOOD | {"descr": "<U8"}, GOOD | {"descr": [("a", "<f4"), ("b", "|O")]}, GOOD | {"descr": "<f4,<f4"},
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff", b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 9000, b"\x93NUMPY\x09\x00", b"",
    ],
)  # fmt: skip
def test_arrays_of_npz_with_another_size_than_their_file_are_an_error(header, tmp_path):
    problem(datasets.npz, npz_with(tmp_path / "x.npz", header, bytes(32)))


def test_a_header_of_npz_that_python_cannot_parse_is_not_a_lack_of_memory(tmp_path):
    text = b"-" * 9000 + b"1"
    header = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    assert "memory" not in problem(datasets.npz, npz_with(tmp_path / "x.npz", header))


def test_arrays_that_unpack_to_far_more_than_their_file_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("torchmn.datasets.formats.files.MOST_UNPACKED", 1 << 20)
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((4, 1 << 18), np.float32), y=np.zeros(4, int))
    assert "64 times their size in the file" in problem(datasets.npz, tmp_path / "zeros.npz")
    np.savez(tmp_path / "zeros.npz", x=np.zeros((4, 1 << 18), np.float32), y=np.zeros(4, int))
    assert len(datasets.npz(tmp_path / "zeros.npz")) == 4
    images, labels = struct.pack(">4B3I", 0, 0, 8, 3, 1400, 28, 28), struct.pack(">4BI", 0, 0, 8, 1, 1400)
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(images + bytes(1400 * 784)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(labels + bytes(1400))
    assert "got at most 1048576" in problem(lambda path: datasets.mnist("test", path.parent), tmp_path / "t10k")


def test_an_npz_file_of_methods_that_numpy_does_not_use_is_an_error(tmp_path):
    for method in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        assert "method" in problem(datasets.npz, npz_with(tmp_path / "x.npz", GOOD, bytes(32), method))


def test_orders_and_dtypes_that_torch_does_not_have_are_converted(tmp_path):
    x = np.arange(8.0).reshape(4, 2)
    np.savez(tmp_path / "x.npz", x=np.asfortranarray(x), y=x.astype(np.longdouble))
    inputs, targets = datasets.npz(tmp_path / "x.npz").take(np.arange(4))
    assert inputs.tolist() == targets.tolist() == x.tolist()


def test_labels_of_npz_beyond_int64_are_an_error(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.ones((2, 2)), y=np.array([1, 2**64 - 1], np.uint64))
    assert "labels" in problem(datasets.npz, tmp_path / "x.npz")


def test_an_image_of_more_pixels_than_its_file_can_have_is_not_decoded(tmp_path):
    path = class_folder(tmp_path)
    Image.new("L", (6000, 5000)).save(path)
    assert "announces 5000 x 6000 pixels" in problem(lambda path: datasets.images(path.parent.parent), path)


def test_an_image_in_a_format_that_starts_other_programs_is_not_opened(tmp_path):
    path = class_folder(tmp_path)
    Image.new("RGB", (4, 4)).save(path, "EPS")
    assert "not an image" in problem(lambda path: datasets.images(path.parent.parent), path)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02]r\xff\xff\xff\x3f.", b"\x80\x04\x8e" + b"\xff" * 8, b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f",
        b"]" * 100_000,
        pickle.dumps({"labels": [1], "data": [1]}), pickle.dumps({"labels": {}, "data": None}),
    ],
)  # fmt: skip
def test_a_pickle_that_reserves_memory_or_has_other_values_is_an_error(content, tmp_path):
    (tmp_path / "test_batch").write_bytes(content)
    problem(lambda path: datasets.cifar10("test", path.parent), tmp_path / "test_batch")


def test_numbers_that_are_not_finite_are_an_error(tmp_path):
    (tmp_path / "housing.data").write_text("nan " * 506 * 14)
    assert "finite" in problem(datasets.housing, tmp_path / "housing.data")


def test_names_that_are_not_utf_8_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / os.fsdecode(b"\xff") / os.fsdecode(b"caf\xe9")
    folder.mkdir(parents=True)
    Image.new("L", (4, 4), 7).save(folder / os.fsdecode(b"\xe9.png"))
    assert datasets.images(folder.parent, channels=1).inputs.tolist() == [[[[7] * 4] * 4]]


def test_without_a_home_directory_data_are_read_without_the_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_242_424)  # of no user
    assert len(mnist_arrays("test", None)) == 1000
    with pytest.raises(DatasetError, match="no home directory to download to"):
        datasets.mnist("test", download=True)
    with pytest.raises(DatasetError, match="~/x"):
        datasets.housing("~/x")
