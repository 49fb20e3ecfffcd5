"""Converts neon's data sets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.tagged_value import Range, TaggedValue, at
from torchmn.experiment.neon.terms.values import one_of

DATASETS = {
    "MNIST": "mnist", "CIFAR10": "cifar10", "CIFAR100": "cifar100", "Iris": "iris", "ToyImages": "ellipses",
    "UniformRandom": "random", "Housing": "housing", "MOBYDICK": "text", "SPARSENET": "sparsenet",
    "Imageset": "images",
}  # fmt: skip
WITHOUT_FILES = ("iris", "ellipses", "random")


def convert_dataset(dataset: TaggedValue, notes: list[str]) -> TaggedValue:
    """Returns the section `dataset`; `notes` receives a line for each key without effect."""
    options: dict[str, Any] = {"name": one_of(DATASETS, dataset, "the data set")}
    _shares(dataset, options, notes)
    _path(dataset, options, notes)
    if dataset.plain("coarse_labels"):
        options["coarse"] = True
    if options["name"] == "random":
        for key, name in (("nin", "shape"), ("nout", "classes"), ("ntrain", "train"), ("ntest", "test")):
            if (found := dataset.get(key)) is None:
                raise ExperimentError(f"{dataset.where}: {dataset.kind} needs the key {key!r}")
            options[name] = at(found.where, [found]) if name == "shape" else found
    elif options["name"] == "images":
        _images(dataset, options, notes)
    elif options["name"] == "text":
        options["length"] = dataset.get("unrolls")
    return at(dataset.where, options)


def _shares(dataset: TaggedValue, options: dict[str, Any], notes: list[str]) -> None:
    """Converts sample_pct and validation_pct, in percent of the training samples, and test_pct, of all samples."""
    for key, name in (("sample_pct", "train_sample"), ("validation_pct", "validation"), ("test_pct", "test")):
        share = dataset.get(key)
        if share is None or dataset.name == "Imageset" or (key == "sample_pct" and dataset.name == "UniformRandom"):
            continue  # neon ignores it
        if share.value == (100 if key == "sample_pct" else 0):
            continue
        options[name] = share
        if not isinstance(share.value, Range):
            percent = dataset.number(key)
            is_fraction = dataset.name == "SPARSENET" and key == "sample_pct" and percent <= 1
            options[name] = TaggedValue(f"{percent * 100 if is_fraction else percent:g}%", share.where)
    if dataset.name == "Housing" and not dataset.plain("test_pct"):
        notes.append(f"{dataset.where}: Housing without test_pct: 10% are held out for testing; neon trained on all")


def _path(dataset: TaggedValue, options: dict[str, Any], notes: list[str]) -> None:
    path = dataset.get("repo_path")
    if path is None or options["name"] in WITHOUT_FILES:
        return
    folder = Path(os.path.expanduser(str(path.value)))
    inside = next((folder / n for n in (dataset.name, dataset.name.lower()) if (folder / n).is_dir()), folder)
    if inside.is_dir():
        options["path"] = TaggedValue(str(inside), path.where)
    elif options["name"] == "mnist":
        notes.append(
            f"{path.where}: repo_path {str(path.value)!r} does not exist: the sample included in TorchMN is used, "
            "unless --data DIR is given"
        )
    else:
        notes.append(f"{path.where}: repo_path {str(path.value)!r} does not exist: use --data DIR")


def _images(dataset: TaggedValue, options: dict[str, Any], notes: list[str]) -> None:
    """Converts neon's macro batches, which were made from a folder per class; a fifth was held out for validation."""
    if (folder := dataset.get("image_dir")) is not None:
        options["path"] = folder
    elif (folder := dataset.get("imageset")) is not None and "path" in options:
        options["path"] = TaggedValue(str(Path(options["path"].value) / str(folder.value)), folder.where)
    if str(dataset.plain("imageset", "")).upper().startswith("I1K"):
        notes.append(
            f"{dataset.where}: Imageset I1K: neon read ImageNet's archives: here, each class needs a folder of images. "
            "Unpack the archives, and pass --data DIR"
        )
    side = dataset.get("cropped_image_size") or dataset.get("output_image_size")
    if side is None:
        raise ExperimentError(f"{dataset.where}: {dataset.kind} needs the key 'cropped_image_size'")
    centred = bool(dataset.plain("mean_norm"))
    options |= {
        "size": [side, side],
        "channels": dataset.plain("num_channels", 3),
        "subtract": "mean" if centred else 127.0,
        "divide": 1.0 if not dataset.plain("unit_norm") else 128.0 if centred else 256.0,
        "first": _most_images(dataset, notes),
    }
    options.setdefault("validation", "20%")
    notes.append(
        f"{dataset.where}: Imageset: images are scaled to cropped_image_size, not to output_image_size, without random "
        "crops and mirroring"
    )


def _most_images(dataset: TaggedValue, notes: list[str]) -> int | None:
    """Returns the number of training images to use at most, which neon has in macro batches."""
    if dataset.get("ntrain") is None:
        if (found := dataset.get("macro_size")) is not None:
            notes.append(f"{found.where}: macro_size has no effect: there is no ntrain, and images are read one by one")
        return None
    if dataset.get("macro_size") is None:
        raise ExperimentError(f"{dataset.where}: {dataset.kind} with ntrain needs the key 'macro_size'")
    return int(dataset.number("ntrain") * dataset.number("macro_size"))
