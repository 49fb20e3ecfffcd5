"""docs/security.md: its bounds are those of the reader, and its files those of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torchmn.datasets.formats import download, files, matlab
from torchmn.experiment.file.document import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES
from torchmn.training.checkpoint.manifest import COMMON, file_of

TEXT = (Path(__file__).parents[2] / "docs" / "security.md").read_text()


def test_its_bounds_are_those_of_the_reader():
    for bound in (f"{MAX_CHARACTERS:,} characters", f"{MAX_VALUES:,} values", f"{MAX_DEPTH} levels"):
        assert bound in " ".join(TEXT.split())


def test_its_bounds_of_data_files_are_those_of_the_readers():
    in_mb = (f"{size / 1e6:.0f} MB" for size in (files.MOST_UNPACKED, matlab.MAX_BYTES, download.MAX_BYTES))
    assert [size in TEXT for size in in_mb] == [True] * 3
    assert f"or {files.UNPACKED_PER_BYTE} times its size" in TEXT


def test_its_files_are_those_of_a_checkpoint():
    for name in (COMMON, file_of(3).replace("3", "N")):
        assert f"`{name}`" in TEXT
