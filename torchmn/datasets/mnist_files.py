"""The four files of MNIST: what they are called, where they are fetched, how they are recognised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchmn.datasets.errors import DatasetError

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


@dataclass(frozen=True)
class MnistFile:
    """One of the four files."""

    stem: str
    dims: int
    sha256: str
    """Of the unpacked content, because mirrors pack the same content differently."""

    @property
    def name(self) -> str:
        """The name under which mirrors publish the file."""
        return f"{self.stem}-idx{self.dims}-ubyte.gz"

    @property
    def names(self) -> tuple[str, ...]:
        """Every name under which people keep the file; unpacked ones first, because they load faster."""
        unpacked = f"{self.stem}-idx{self.dims}-ubyte", f"{self.stem}.idx{self.dims}-ubyte"
        return *unpacked, *(f"{name}.gz" for name in unpacked)

    def locate(self, root: Path) -> Path | None:
        """Where the file is in `root`, or in the folders in which torchvision keeps it; None if nowhere."""
        folders = root, root / "raw", root / "MNIST" / "raw"
        paths = (folder / name for folder in folders for name in self.names)
        return next((path for path in paths if path.is_file()), None)

    def find(self, root: Path) -> Path:
        """As `locate`, with a DatasetError that says what was looked for."""
        path = self.locate(root)
        if path is not None:
            return path
        if not root.is_dir():
            raise DatasetError(f"root {str(root)!r} is not a directory; it should hold MNIST's IDX files.")
        present = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) or "nothing"
        raise DatasetError(
            f"no {self.name} in {str(root)!r} (which holds: {present}). Looked for {', '.join(self.names)}, "
            f"also in raw/ and MNIST/raw/. Pass download=True to fetch it there, or leave out root for the "
            f"sample that comes with TorchMN."
        )


@dataclass(frozen=True)
class MnistSplit:
    """The images and the labels that belong together."""

    images: MnistFile
    labels: MnistFile


SPLITS = {
    "train": MnistSplit(
        MnistFile("train-images", 3, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        MnistFile("train-labels", 1, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    ),
    "test": MnistSplit(
        MnistFile("t10k-images", 3, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        MnistFile("t10k-labels", 1, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
}
