"""Housing, texts and MATLAB files, in the formats of their sources."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.datasets.files import read_matlab
from torchmn.datasets import DatasetError, housing, sparsenet, text


def test_housing_has_the_price_in_its_last_column(tmp_path):
    table = np.random.default_rng(0).random((506, 14)).round(3)
    lines = [" ".join(f"{value:8.3f}" for value in row[:11]) + "\n  " + " ".join(map(str, row[11:])) for row in table]
    (tmp_path / "housing.data").write_text("\n".join(lines) + "\n")  # rows may go over two lines
    read = housing(tmp_path)
    np.testing.assert_allclose(read.inputs, table[:, :13], rtol=1e-6)
    np.testing.assert_allclose(read.targets, table[:, 13:], rtol=1e-6)
    assert np.array_equal(housing(tmp_path / "housing.data").inputs, read.inputs)


@pytest.mark.parametrize(
    ("content", "message"), [("1 2 3", "expected 506 x 14 numbers .*, got 3"), ("a b", "something other than numbers")]
)
def test_other_files_than_housing_are_refused(content, message, tmp_path):
    (tmp_path / "housing.data").write_text(content)
    with pytest.raises(DatasetError, match=message):
        housing(tmp_path)
    with pytest.raises(DatasetError, match="cannot be read"):
        housing(tmp_path / "elsewhere")


def test_a_text_is_windows_and_the_character_after_each(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"Call me\r\nIsh\xe9mael~")
    read = text(tmp_path, length=4)
    shown = ["".join(read.classes[k] if k else "?" for k in row.argmax(axis=1)) for row in read.inputs]
    assert shown == ["Call", " me ", "Ish?", "mael"] and (read.inputs.sum(axis=2) == 1).all()
    assert [read.classes[k] for k in read.targets] == [" ", "I", "m", "~"]
    assert text(tmp_path / "book.txt", length=4, stride=1).inputs.shape == (13, 4, 96)


def test_a_text_that_is_not_there_or_too_short_or_one_of_several_is_refused(tmp_path):
    with pytest.raises(DatasetError, match="no file or folder"):
        text(tmp_path / "none")
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(DatasetError, match="2 characters, too few for a window of 2"):
        text(tmp_path, length=2)
    (tmp_path / "b.txt").write_text("ab")
    with pytest.raises(DatasetError, match=r"expected one text file in .* got a.txt, b.txt"):
        text(tmp_path)
    (tmp_path / "pg2701.txt").write_text("Call me Ishmael.")
    assert len(text(tmp_path, length=5)) == 3


def element(kind: int, data: bytes, order: str = "<") -> bytes:
    if 0 < len(data) <= 4:
        return struct.pack(f"{order}I", len(data) << 16 | kind) + data.ljust(4, b"\0")
    return struct.pack(f"{order}II", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def matlab(name: str, array: np.ndarray, order: str = "<", compressed: bool = False) -> bytes:
    """A file with one array, after the description of the format (MAT-File Level 5)."""
    codes = {"f8": 9, "u1": 2, "f4": 7}
    kind = codes[array.dtype.str[1:]]
    flags = struct.pack(f"{order}II", 6, 0)
    body = element(6, flags, order) + element(5, struct.pack(f"{order}{array.ndim}i", *array.shape), order)
    body += element(1, name.encode(), order) + element(
        kind, array.astype(order + array.dtype.str[1:]).tobytes("F"), order
    )
    whole = element(14, body, order)
    if compressed:
        packed = zlib.compress(whole)
        whole = struct.pack(f"{order}II", 15, len(packed)) + packed
    return b"MATLAB 5.0 MAT-file".ljust(124, b" ") + struct.pack(f"{order}HH", 0x0100, 0x4D49) + whole


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", [np.float64, np.uint8])
def test_an_array_of_matlab_is_read_as_it_was_saved(order, compressed, dtype, tmp_path):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    (tmp_path / "x.mat").write_bytes(matlab("IMAGES", array, order, compressed))
    read = read_matlab(tmp_path / "x.mat")
    assert list(read) == ["IMAGES"] and np.array_equal(read["IMAGES"], array)


@pytest.mark.parametrize("cut", [60, 140, 200, 300])
def test_a_damaged_file_of_matlab_is_refused(cut, tmp_path):
    (tmp_path / "x.mat").write_bytes(matlab("x", np.ones((4, 5, 6)))[:cut])
    with pytest.raises(DatasetError, match=r"x\.mat"):
        read_matlab(tmp_path / "x.mat")


def test_photographs_are_cut_into_patches_that_are_also_the_targets(tmp_path: Path):
    images = np.random.default_rng(0).random((512, 512, 2)).astype(np.float32)
    (tmp_path / "IMAGES.mat").write_bytes(matlab("IMAGES", images))
    read = sparsenet(tmp_path)
    assert read.inputs.shape == (2 * 1024, 1, 16, 16) and read.targets is read.inputs
    assert np.array_equal(read.inputs[1024 + 33, 0], images[16:32, 16:32, 1])
    with pytest.raises(DatasetError, match=r"IMAGES_RAW.mat: cannot be read"):
        sparsenet(tmp_path, whitened=False)
