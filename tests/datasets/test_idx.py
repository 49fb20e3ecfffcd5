"""IDX files: written values are read back, and errors name damaged files."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.datasets.files import read_idx, write_idx
from torchmn.errors import DatasetError

PIXELS = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A valid gzipped IDX file of PIXELS."""
    path = tmp_path / "pixels.gz"
    write_idx(path, PIXELS)
    return path


@given(values=arrays.arrays(np.uint8, st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)))
def test_what_is_written_is_read(values, tmp_path_factory):
    path = tmp_path_factory.mktemp("idx") / "values.gz"
    write_idx(path, values)
    np.testing.assert_array_equal(read_idx(path, dims=values.ndim), values)


def test_the_bytes_are_those_of_the_format(packed):
    header = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4])
    assert gzip.decompress(packed.read_bytes()) == header + bytes(range(24))


def test_the_content_and_not_the_name_decides_whether_a_file_is_gzipped(packed, tmp_path):
    unpacked_under_the_packed_name = tmp_path / "again.gz"
    unpacked_under_the_packed_name.write_bytes(gzip.decompress(packed.read_bytes()))
    packed_under_the_unpacked_name = tmp_path / "plain"
    packed_under_the_unpacked_name.write_bytes(packed.read_bytes())
    np.testing.assert_array_equal(read_idx(unpacked_under_the_packed_name, 3), PIXELS)
    np.testing.assert_array_equal(read_idx(packed_under_the_unpacked_name, 3), PIXELS)


def damaged(path: Path, content: bytes) -> str:
    """Returns the error of `read_idx` for a file with this content; it must name the file."""
    path.write_bytes(content)
    with pytest.raises(DatasetError) as caught:
        read_idx(path, dims=3)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_of_another_kind_is_refused_with_both_magic_numbers(tmp_path):
    message = damaged(tmp_path / "f", b"<!DOCTYPE html>")
    assert "3c 21 44 4f" in message
    assert "00 00 08 03" in message


def test_an_empty_file_is_refused(tmp_path):
    assert "is empty" in damaged(tmp_path / "f", b"")


def test_labels_where_images_belong_are_refused(tmp_path):
    write_idx(tmp_path / "labels", np.zeros(5, np.uint8))
    assert "00 00 08 01" in damaged(tmp_path / "labels", (tmp_path / "labels").read_bytes())


def test_a_header_cut_off_is_refused_with_its_size(tmp_path):
    assert "expected at least 16 bytes, got 6" in damaged(tmp_path / "f", bytes([0, 0, 8, 3, 0, 0]))


@pytest.mark.parametrize(("change", "word", "follow"), [(-1, "truncated", 23), (+1, "too long", 25)])
def test_a_wrong_number_of_values_is_refused_with_both_numbers(packed, tmp_path, change, word, follow):
    content = gzip.decompress(packed.read_bytes()) + b"\0"
    message = damaged(tmp_path / "f", content[: len(content) - 1 + change])
    assert word in message
    assert "2 x 3 x 4 = 24 bytes" in message
    assert f"got {follow}" in message


def test_extents_that_no_file_could_hold_are_refused_without_allocating_them(tmp_path):
    assert "got 0" in damaged(tmp_path / "f", bytes([0, 0, 8, 3]) + b"\xff" * 12)


@pytest.mark.parametrize("keep", [3, 12, -9, -1])
def test_a_gzip_file_cut_off_anywhere_is_refused(packed, tmp_path, keep):
    assert "damaged or truncated gzip file" in damaged(tmp_path / "f", packed.read_bytes()[:keep])


def test_a_gzip_file_with_a_flipped_bit_is_refused(packed, tmp_path):
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 1
    damaged(tmp_path / "f", bytes(content))


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(DatasetError, match=r"absent.*No such file"):
        read_idx(tmp_path / "absent", dims=1)
