"""Data sets that an experiment file can use. `build(folder, seed)` returns the arrays of each split.

Users register a function of the directory that returns `{"train": (inputs, targets), "test": ...}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, WithJsonSchema

from torchmn import datasets
from torchmn.datasets import Arrays, DatasetError
from torchmn.datasets.formats.files import expanded
from torchmn.datasets.load_cifar10 import cifar10_arrays
from torchmn.datasets.load_cifar100 import cifar100_arrays
from torchmn.datasets.load_mnist import mnist_arrays
from torchmn.experiment.file.fields import (
    SPLITS,
    Count,
    Positive,
    Resolved,
    SampleFraction,
    ShapeField,
    wrong_value,
)
from torchmn.experiment.file.registry import Options, register_dataset
from torchmn.experiment.file.registry import datasets as registered

MAX_RANDOM_VALUES = 2**40
"""More than any memory holds. For larger counts, NumPy's error is about dimensions and not about memory."""


def _subtrahend(value: object) -> float | str:
    if value == "mean":
        return "mean"
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise wrong_value("a number, or `mean`")


Subtrahend = Resolved[
    float | Literal["mean"],
    BeforeValidator(_subtrahend),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"const": "mean"}]}),
]
Splits = dict[str, Arrays]
"""Arrays by split: "train", and optionally "validation" and "test"."""


class DatasetOptions(Options):
    """Base class of data sets, with the options common to all of them."""

    function_method: ClassVar[str] = "load"

    path: str | None = Field(None, description="directory or file of the data; --data replaces it")
    sample: SampleFraction | None = Field(None, description="the fraction of each split to use, such as 10%")
    train_sample: SampleFraction | None = Field(
        None, description="the fraction of the training samples to use; ignored if `sample` is set"
    )
    validation: SampleFraction | None = Field(
        None, description="the fraction of the training samples to hold out, such as 10%"
    )

    def build(self, folder: Path | None, seed: int) -> Splits:
        """Returns the arrays of each split, sampled and with validation samples held out.

        Args:
            folder: the path from --data, which replaces the option `path`; None if not given.
            seed: selects the samples that are used or held out.
        """
        path = folder if folder is not None else expanded(self.path) if self.path else None
        splits = self._to_arrays(self.load(path))
        if self.sample is not None:
            splits = {name: arrays.sampled(self.sample, seed) for name, arrays in splits.items()}
        elif self.train_sample is not None:
            splits = {**splits, "train": splits["train"].sampled(self.train_sample, seed)}
        if self.validation is None:
            return splits
        train, held_out = splits["train"].parted(self.validation, seed)
        return {"train": train, "validation": held_out, **{name: splits[name] for name in splits if name != "train"}}

    def load(self, folder: Path | None) -> Splits:
        """Returns all samples of each split; `folder` is the path from --data or `path`."""
        raise NotImplementedError

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        """Returns the shape of a sample if it is known without reading files; `folder` is the path from --data."""
        return None

    def _to_arrays(self, splits: object) -> Splits:
        """Checks the result of `load`, and converts pairs of inputs and targets to `Arrays`."""
        if not isinstance(splits, Mapping) or "train" not in splits:
            got = f"the keys {', '.join(map(repr, splits))}" if isinstance(splits, Mapping) else type(splits).__name__
            raise DatasetError(f"{self.kind}: expected {{'train': (inputs, targets), 'test': ...}}, got {got}")
        unknown = [name for name in splits if name not in SPLITS]
        if unknown:
            raise DatasetError(f"{self.kind}: expected the splits train, validation and test, got {unknown[0]!r}")
        return {
            split: data if isinstance(data, Arrays) else self._from_pair(split, data) for split, data in splits.items()
        }

    def _from_pair(self, split: str, pair: object) -> Arrays:
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
                f"{name}: expected integer targets, which are labels, to have shape (samples,), got {targets.shape}; "
                "use floats for values to regress"
            )
        if targets.dtype.kind not in "fiub" or (targets.dtype.kind == "i" and targets.min() < 0):
            got = f"{targets.dtype}, the first {targets.flat[0]}"
            raise DatasetError(f"{name}: expected targets to be labels 0, 1, ... or floats, got {got}")
        return Arrays(name, inputs, targets if targets.dtype.kind == "f" else targets.astype(np.int64))

    def required_folder(self, folder: Path | None, example: str) -> Path:
        """Returns the directory of the data set: `folder`, or the subdirectory of it with the data set's name.

        Raises:
            DatasetError: if there is no folder; the message shows `example`.
        """
        if folder is None:
            raise DatasetError(
                f"{self.kind}: no directory given. Pass --data {example}, or set dataset: {{name: {self.kind}, path: "
                "...}."
            )
        return folder / self.kind if (folder / self.kind).is_dir() else folder


def _native(values: np.ndarray) -> np.ndarray:
    """Returns the values in native byte order, which torch requires."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


registered.function_base = DatasetOptions


@register_dataset("mnist")
class MNIST(DatasetOptions):
    """Handwritten digits; without a path, the 6,000 + 1,000 samples that are part of TorchMN."""

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (1, 28, 28) if folder is None and self.path is None else None

    def load(self, folder: Path | None) -> Splits:
        if folder is not None and (folder / "mnist").is_dir():
            folder = folder / "mnist"
        return {split: mnist_arrays(split, folder) for split in ("train", "test")}


@register_dataset("cifar10")
class CIFAR10(DatasetOptions):
    """Colour photographs of ten classes, from the Python or binary files."""

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (3, 32, 32)

    def load(self, folder: Path | None) -> Splits:
        folder = self.required_folder(folder, "DIR/cifar-10-batches-bin")
        return {split: cifar10_arrays(split, folder) for split in ("train", "test")}


@register_dataset("cifar100")
class CIFAR100(DatasetOptions):
    """Colour photographs of a hundred classes, from the Python or binary files."""

    coarse: bool = Field(False, description="use the 20 superclasses as labels")

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (3, 32, 32)

    def load(self, folder: Path | None) -> Splits:
        folder = self.required_folder(folder, "DIR/cifar-100-binary")
        return {split: cifar100_arrays(split, folder, self.coarse) for split in ("train", "test")}


@register_dataset("iris")
class Iris(DatasetOptions):
    """Four measurements of each of 150 flowers; part of TorchMN."""

    def load(self, folder: Path | None) -> Splits:
        return {split: datasets.iris(split) for split in ("train", "test")}


@register_dataset("images")
class Images(DatasetOptions):
    """Images in DIR/train/CLASS/ and DIR/test/CLASS/, or in DIR/CLASS/."""

    size: list[Count] | None = Field(None, min_length=2, max_length=2, description="height and width, such as [32, 32]")
    channels: int = Field(3, description="3 for colour, 1 for grey")
    first: Count | None = Field(None, description="the number of training images to use at most, chosen at random")
    subtract: Subtrahend = Field(
        0.0, description="what to subtract from pixels of 0 to 255: a number, or `mean` for the mean training image"
    )
    divide: Positive = Field(255.0, description="by what to divide the pixels then")

    def build(self, folder: Path | None, seed: int) -> Splits:
        splits = super().build(folder, seed)
        train, offset = splits["train"], None
        if self.subtract == "mean":
            offset = train.inputs.mean(axis=0, dtype=np.float64).astype(np.float32)
        elif self.subtract:
            offset = np.full(train.shape, self.subtract, dtype=np.float32)
        if self.first is not None and self.first < len(train):
            splits = {**splits, "train": train.sampled(self.first / len(train), seed)}
        return {name: replace(arrays, offset=offset, scale=1 / self.divide) for name, arrays in splits.items()}

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return (self.channels, *self.size) if self.size else None

    def load(self, folder: Path | None) -> Splits:
        if self.channels not in (1, 3):
            raise DatasetError(f"images: expected channels to be 1 or 3, got {self.channels}")
        folder = self.required_folder(folder, "DIR")
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
    """An .npz file with x_train, y_train and, for a test split, x_test and y_test."""

    def load(self, folder: Path | None) -> Splits:
        if folder is None:
            raise DatasetError("npz: no file given. Pass --data FILE.npz, or set dataset: {name: npz, path: FILE.npz}.")
        splits = {split: datasets.npz(folder, split) for split in ("train", "test")}
        return {split: arrays for split, arrays in splits.items() if arrays is not None}


class HeldOut(DatasetOptions):
    """A data set without splits, of which a fraction is held out for testing."""

    test: SampleFraction = Field(0.1, description="the fraction to test on, such as 10%", validate_default=True)
    seed: int = Field(0, ge=0, description="selects the test samples")

    def load(self, folder: Path | None) -> Splits:
        train, test = self.load_all(folder).parted(self.test, self.seed, "test")
        return {"train": train, "test": test}

    def load_all(self, folder: Path | None) -> Arrays:
        """Returns all samples."""
        raise NotImplementedError


@register_dataset("housing")
class Housing(HeldOut):
    """13 attributes of 506 suburbs of Boston, and the median price of a house (UCI's housing.data)."""

    def load_all(self, folder: Path | None) -> Arrays:
        return datasets.housing(self.required_folder(folder, "DIR"))


@register_dataset("sparsenet")
class Sparsenet(HeldOut):
    """Patches of ten photographs of nature (IMAGES.mat); the targets are the inputs."""

    whitened: bool = Field(True, description="use IMAGES.mat; false for IMAGES_RAW.mat")

    def load_all(self, folder: Path | None) -> Arrays:
        return datasets.sparsenet(self.required_folder(folder, "DIR"), whitened=self.whitened)


@register_dataset("text", "mobydick")
class Text(DatasetOptions):
    """A text file: the target of `length` characters is the next one. The end of the file is the test split."""

    length: Count = Field(20, description="number of characters of a sample")
    stride: Count | None = Field(None, description="distance between the starts of samples; default: their length")
    test: SampleFraction = Field(
        0.1, description="the fraction at the end of the file to test on, such as 10%", validate_default=True
    )

    def load(self, folder: Path | None) -> Splits:
        if folder is None:
            raise DatasetError(
                "text: no file given. Pass --data FILE.txt, or set dataset: {name: text, path: FILE.txt}."
            )
        everything = datasets.text(folder, length=self.length, stride=self.stride)
        tests = round(len(everything) * self.test)
        if not 0 < tests < len(everything):
            raise DatasetError(f"text: {self.test:.3g} of {len(everything)} samples for testing leaves a split empty")
        rows = np.arange(len(everything))
        return {"train": everything.only(rows[:-tests]), "test": everything.only(rows[-tests:], "text test")}


@register_dataset("random")
class Random(DatasetOptions):
    """Random inputs of any shape, and random labels."""

    shape: ShapeField = Field(description="the shape of a sample, such as [3, 32, 32]")
    classes: Count = 10
    train: Count = Field(1000, description="number of training samples")
    test: int = Field(200, ge=0, description="number of test samples")
    seed: int = Field(0, ge=0)

    def known_shape(self, folder: str | None) -> tuple[int, ...] | None:
        return self.shape

    def load(self, folder: Path | None) -> Splits:
        count = max(self.train, self.test)
        if count * math.prod(self.shape) > MAX_RANDOM_VALUES:
            raise DatasetError(f"random: {count} samples of shape {self.shape} are too many values to generate")
        splits = {"train": datasets.random(self.shape, count=self.train, classes=self.classes, seed=self.seed)}
        if self.test:
            splits["test"] = datasets.random(self.shape, count=self.test, classes=self.classes, seed=self.seed + 1)
        return splits


@register_dataset("ellipses")
class Ellipses(DatasetOptions):
    """Coloured outlines, half of them circles and half ellipses: neon's ToyImages."""

    side: int = Field(32, ge=16, multiple_of=2, description="height and width; even")
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
    """Generated images of circles, squares, crosses and stripes."""

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
