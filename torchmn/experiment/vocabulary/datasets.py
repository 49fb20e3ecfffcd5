"""The data sets that an experiment file can name. `build(folder, seed)` gives the arrays of each split.

A data set of a user's own is a function of the folder, which gives pairs of inputs and targets by the names of splits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from torchmn import datasets
from torchmn.datasets import Arrays, DatasetError
from torchmn.datasets.byte_images import cifar10_arrays, cifar100_arrays, mnist_arrays
from torchmn.experiment.file.fields import Count, Sample, ShapeField
from torchmn.experiment.file.registry import Options, register_dataset
from torchmn.experiment.file.registry import datasets as registered

MOST_VALUES = 2**40
"""More random numbers than any memory holds, and numpy begins to speak of its dimensions."""

Splits = dict[str, Arrays]
"""train, and validation and test where there are any."""


class DatasetOptions(Options):
    """What every data set has."""

    as_function: ClassVar[str] = "load"

    path: str | None = Field(None, description="where its files are; the flag --data says so too")
    sample: Sample | None = Field(None, description="take only a share of it, of every split, as 10%")
    train_sample: Sample | None = Field(
        None, description="take only a share of the training samples, where `sample` is not said"
    )
    validation: Sample | None = Field(None, description="a share of the training samples to hold out, as 10%")

    def build(self, folder: Path | None, seed: int) -> Splits:
        """The arrays of each split; `folder` is what --data says, and wins."""
        place = folder if folder is not None else Path(self.path).expanduser() if self.path else None
        splits = self._arrays(self.load(place))
        if self.sample is not None:
            splits = {name: arrays.sampled(self.sample, seed) for name, arrays in splits.items()}
        elif self.train_sample is not None:
            splits = {**splits, "train": splits["train"].sampled(self.train_sample, seed)}
        if self.validation is None:
            return splits
        train, held_out = splits["train"].parted(self.validation, seed)
        return {"train": train, "validation": held_out, **{name: splits[name] for name in splits if name != "train"}}

    def load(self, folder: Path | None) -> Splits:
        raise NotImplementedError

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        """The shape of a sample, where it is known before any file is read; `folder` is what --data says."""
        return None

    def _arrays(self, given: Any) -> Splits:
        """What `load` gave, with pairs of inputs and targets as Arrays."""
        if not isinstance(given, Mapping) or "train" not in given:
            got = f"the keys {', '.join(map(repr, given))}" if isinstance(given, Mapping) else type(given).__name__
            raise DatasetError(f"{self.kind}: expected {{'train': (inputs, targets), 'test': ...}}, got {got}")
        unknown = [name for name in given if name not in ("train", "validation", "test")]
        if unknown:
            raise DatasetError(f"{self.kind}: expected the splits train, validation and test, got {unknown[0]!r}")
        return {
            split: some if isinstance(some, Arrays) else self._from_pair(split, some) for split, some in given.items()
        }

    def _from_pair(self, split: str, pair: Any) -> Arrays:
        name = f"{self.kind} {split}"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DatasetError(
                f"{name}: expected a pair (inputs, targets) of arrays or tensors, got {type(pair).__name__}"
            )
        inputs, targets = (_native(np.asarray(values)) for values in pair)
        if inputs.ndim < 2 or inputs.dtype.kind not in "fiub":
            raise DatasetError(
                f"{name}: expected inputs to be numbers of shape (samples, ...), got {inputs.dtype} {inputs.shape}"
            )
        if len(inputs) != len(targets) or not len(inputs):
            raise DatasetError(f"{name}: expected as many targets as inputs, got {len(targets)} and {len(inputs)}")
        if targets.dtype.kind in "iub" and targets.ndim > 1:
            raise DatasetError(
                f"{name}: expected whole-number targets, which are labels, to be of shape (samples,), got "
                f"{targets.shape}; values to be reproduced are floats"
            )
        if targets.dtype.kind not in "fiub" or (targets.dtype.kind == "i" and targets.min() < 0):
            got = f"{targets.dtype}, the first {targets.flat[0]}"
            raise DatasetError(f"{name}: expected targets to be labels 0, 1, ... or floats, got {got}")
        return Arrays(name, inputs, targets if targets.dtype.kind == "f" else targets.astype(np.int64))

    def needed(self, folder: Path | None, example: str) -> Path:
        """The folder, without which this data set can not be read; or the folder in it that has its name."""
        if folder is None:
            raise DatasetError(
                f"{self.kind}: where is it? Say --data {example}, or dataset: {{name: {self.kind}, path: ...}}."
            )
        return folder / self.kind if (folder / self.kind).is_dir() else folder


def _native(values: np.ndarray) -> np.ndarray:
    """The values in this machine's order of bytes, which is the only one that torch takes."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


registered.base_of_functions = DatasetOptions


@register_dataset("mnist")
class MNIST(DatasetOptions):
    """Handwritten digits; without a path, the sample of 6,000 + 1,000 that comes with TorchMN."""

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (1, 28, 28) if folder is None and self.path is None else None

    def load(self, folder: Path | None) -> Splits:
        if folder is not None and (folder / "mnist").is_dir():
            folder = folder / "mnist"
        return {split: mnist_arrays(split, folder) for split in ("train", "test")}


@register_dataset("cifar10")
class CIFAR10(DatasetOptions):
    """Colour photographs of ten classes, as python or binary files."""

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (3, 32, 32)

    def load(self, folder: Path | None) -> Splits:
        folder = self.needed(folder, "DIR/cifar-10-batches-bin")
        return {split: cifar10_arrays(split, folder) for split in ("train", "test")}


@register_dataset("cifar100")
class CIFAR100(DatasetOptions):
    """Colour photographs of a hundred classes, as python or binary files."""

    coarse: bool = Field(False, description="the 20 groups of classes as labels")

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (3, 32, 32)

    def load(self, folder: Path | None) -> Splits:
        folder = self.needed(folder, "DIR/cifar-100-binary")
        return {split: cifar100_arrays(split, folder, self.coarse) for split in ("train", "test")}


@register_dataset("iris")
class Iris(DatasetOptions):
    """Four measurements of 150 flowers; comes with TorchMN."""

    def load(self, folder: Path | None) -> Splits:
        return {split: datasets.iris(split) for split in ("train", "test")}


@register_dataset("images")
class Images(DatasetOptions):
    """Images in DIR/train/CLASS/ and DIR/test/CLASS/, or in DIR/CLASS/."""

    size: list[Count] | None = Field(None, min_length=2, max_length=2, description="height and width, as [32, 32]")
    channels: int = Field(3, description="3 for colours, 1 for grey")

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (self.channels, *self.size) if self.size else None

    def load(self, folder: Path | None) -> Splits:
        if self.channels not in (1, 3):
            raise DatasetError(f"images: expected channels to be 1 or 3, got {self.channels}")
        folder = self.needed(folder, "DIR")
        size = (self.size[0], self.size[1]) if self.size else None
        if not (folder / "train").is_dir():
            return {"train": datasets.images(folder, size=size, channels=self.channels)}
        train = datasets.images(folder / "train", size=size, channels=self.channels)
        if not (folder / "test").is_dir():
            return {"train": train}
        size = size or (train.shape[1], train.shape[2])
        test = datasets.images(folder / "test", size=size, channels=self.channels, classes=train.classes)
        return {"train": train, "test": test}


@register_dataset("npz")
class Npz(DatasetOptions):
    """An .npz file with x_train, y_train and, if there is a test split, x_test, y_test."""

    def load(self, folder: Path | None) -> Splits:
        if folder is None:
            raise DatasetError("npz: which file? Say --data FILE.npz, or dataset: {name: npz, path: FILE.npz}.")
        splits = {split: datasets.npz(folder, split) for split in ("train", "test")}
        return {split: arrays for split, arrays in splits.items() if arrays is not None}


class HeldOut(DatasetOptions):
    """A data set of one piece, of which a share is held out for testing."""

    test: Sample = Field(0.1, description="a share to test on, as 10%", validate_default=True)
    seed: int = Field(0, ge=0, description="which samples these are")

    def load(self, folder: Path | None) -> Splits:
        train, test = self.whole(folder).parted(self.test, self.seed, "test")
        return {"train": train, "test": test}

    def whole(self, folder: Path | None) -> Arrays:
        raise NotImplementedError


@register_dataset("housing")
class Housing(HeldOut):
    """13 numbers about each of 506 suburbs of Boston, and the price of a house there (UCI's housing.data)."""

    def whole(self, folder: Path | None) -> Arrays:
        return datasets.housing(self.needed(folder, "DIR"))


@register_dataset("sparsenet")
class Sparsenet(HeldOut):
    """Pieces of ten photographs of nature (IMAGES.mat), which are their own targets."""

    whitened: bool = Field(True, description="IMAGES.mat, and not IMAGES_RAW.mat")

    def whole(self, folder: Path | None) -> Arrays:
        return datasets.sparsenet(self.needed(folder, "DIR"), whitened=self.whitened)


@register_dataset("text", "mobydick")
class Text(DatasetOptions):
    """A text file: from `length` characters, the next is to be told. Its last part is for testing."""

    length: Count = Field(20, description="how many characters a sample has")
    stride: Count | None = Field(None, description="how far apart samples begin; their length, if not said")
    test: Sample = Field(0.1, description="which share of the end is for testing, as 10%", validate_default=True)

    def load(self, folder: Path | None) -> Splits:
        if folder is None:
            raise DatasetError("text: which file? Say --data FILE.txt, or dataset: {name: text, path: FILE.txt}.")
        everything = datasets.text(folder, length=self.length, stride=self.stride)
        tested = round(len(everything) * self.test)
        if not 0 < tested < len(everything):
            raise DatasetError(f"text: {self.test:.3g} of {len(everything)} samples leaves one part empty")
        rows = np.arange(len(everything))
        return {"train": everything.only(rows[:-tested]), "test": everything.only(rows[-tested:], "text test")}


@register_dataset("random")
class Random(DatasetOptions):
    """Random inputs of any shape, and random labels."""

    shape: ShapeField = Field(description="the shape of a sample, as [3, 32, 32]")
    classes: Count = 10
    train: Count = Field(1000, description="how many samples to train on")
    test: int = Field(200, ge=0, description="how many samples to test on")
    seed: int = Field(0, ge=0)

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return self.shape

    def load(self, folder: Path | None) -> Splits:
        if self.train * math.prod(self.shape) > MOST_VALUES or self.test * math.prod(self.shape) > MOST_VALUES:
            raise DatasetError(f"random: {max(self.train, self.test)} samples of {self.shape} are too many to be made")
        splits = {"train": datasets.random(self.shape, count=self.train, classes=self.classes, seed=self.seed)}
        if self.test:
            splits["test"] = datasets.random(self.shape, count=self.test, classes=self.classes, seed=self.seed + 1)
        return splits


@register_dataset("ellipses")
class Ellipses(DatasetOptions):
    """Outlines of circles and ellipses in colour, half of each: neon's ToyImages."""

    side: int = Field(32, ge=16, multiple_of=2, description="height and width, even")
    train: Count = 128
    test: int = Field(128, ge=0)
    seed: int = Field(0, ge=0)

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (3, self.side, self.side)

    def load(self, folder: Path | None) -> Splits:
        everything = datasets.ellipses(count=self.train + self.test, side=self.side, seed=self.seed)
        rows = np.arange(len(everything))
        splits = {"train": everything.only(rows[: self.train])}
        if self.test:
            splits["test"] = everything.only(rows[self.train :])
        return splits


@register_dataset("toy_images")
class ToyImages(DatasetOptions):
    """Drawn circles, squares, crosses and stripes."""

    side: int = Field(32, ge=8, description="height and width")
    train: Count = 1000
    test: int = Field(200, ge=0)
    seed: int = Field(0, ge=0)

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (1, self.side, self.side)

    def load(self, folder: Path | None) -> Splits:
        splits = {"train": datasets.toy_images(count=self.train, side=self.side, seed=self.seed)}
        if self.test:
            splits["test"] = datasets.toy_images(count=self.test, side=self.side, seed=self.seed + 1)
        return splits
