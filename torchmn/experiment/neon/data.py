"""neon's data sets, in our words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.neon.tagged_value import Range, Said, at
from torchmn.experiment.neon.values import one_of

DATASETS = {
    "MNIST": "mnist", "CIFAR10": "cifar10", "CIFAR100": "cifar100", "Iris": "iris", "ToyImages": "ellipses",
    "UniformRandom": "random", "Housing": "housing", "MOBYDICK": "text", "SPARSENET": "sparsenet",
    "Imageset": "images",
}  # fmt: skip
WITHOUT_FILES = ("iris", "ellipses", "random")


def convert_dataset(said: Said, notes: list[str]) -> Said:
    """Our data set; what has no meaning today goes to `notes`."""
    ours: dict[str, Any] = {"name": one_of(DATASETS, said, "the data set")}
    _shares(said, ours, notes)
    _path(said, ours, notes)
    if said.plain("coarse_labels"):
        ours["coarse"] = True
    if ours["name"] == "random":
        for key, name in (("nin", "shape"), ("nout", "classes"), ("ntrain", "train"), ("ntest", "test")):
            if (found := said.get(key)) is None:
                raise ExperimentError(f"{said.where}: {said.kind} needs the key {key!r}")
            ours[name] = at(found.where, [found]) if name == "shape" else found
    elif ours["name"] == "images":
        _images(said, ours, notes)
    elif ours["name"] == "text":
        ours["length"] = said.get("unrolls")
    return at(said.where, ours)


def _shares(said: Said, ours: dict[str, Any], notes: list[str]) -> None:
    """sample_pct, validation_pct and test_pct: in percent, of the training samples, of them, and of the data."""
    for key, name in (("sample_pct", "train_sample"), ("validation_pct", "validation"), ("test_pct", "test")):
        share = said.get(key)
        if share is None or said.name == "Imageset" or (key == "sample_pct" and said.name == "UniformRandom"):
            continue  # which do not look at them
        if share.value == (100 if key == "sample_pct" else 0):
            continue
        ours[name] = share
        if not isinstance(share.value, Range):
            percent = said.number(key)
            of_one = said.name == "SPARSENET" and key == "sample_pct" and percent <= 1
            ours[name] = Said(f"{percent * 100 if of_one else percent:g}%", share.where)
    if said.name == "Housing" and not said.plain("test_pct"):
        notes.append(f"{said.where}: Housing without test_pct: 10% are held out to test on, and neon trained on all")


def _path(said: Said, ours: dict[str, Any], notes: list[str]) -> None:
    path = said.get("repo_path")
    if path is None or ours["name"] in WITHOUT_FILES:
        return
    folder = Path(str(path.value)).expanduser()
    inside = next((folder / n for n in (said.name, said.name.lower()) if (folder / n).is_dir()), folder)
    if inside.is_dir():
        ours["path"] = Said(str(inside), path.where)
    elif ours["name"] == "mnist":
        what = "the sample that comes with TorchMN"
        notes.append(f"{path.where}: repo_path {str(path.value)!r} is not there: {what} is used, or --data DIR")
    else:
        notes.append(f"{path.where}: repo_path {str(path.value)!r} is not there: say --data DIR")


def _images(said: Said, ours: dict[str, Any], notes: list[str]) -> None:
    """Macro batches were made of a folder for each class, of which neon held a fifth out for validation."""
    if str(said.plain("imageset", "")).upper().startswith("I1K"):
        raise ExperimentError(
            f"{said.where}: Imageset of I1K is not supported: it was made of ImageNet's archives. Unpack these into a "
            "folder for each class, and say `dataset: {name: images, path: DIR, size: [224, 224]}` in our format"
        )
    if (folder := said.get("image_dir")) is not None:
        ours["path"] = folder
    elif (folder := said.get("imageset")) is not None and "path" in ours:
        ours["path"] = Said(str(Path(ours["path"].value) / str(folder.value)), folder.where)
    side = said.get("cropped_image_size") or said.get("output_image_size")
    if side is None:
        raise ExperimentError(f"{said.where}: {said.kind} needs the key 'cropped_image_size'")
    ours |= {"size": [side, side], "channels": said.plain("num_channels", 3)}
    ours.setdefault("validation", "20%")
    notes.append(
        f"{said.where}: Imageset: images are scaled to cropped_image_size, not to output_image_size, and neither "
        "cropped nor mirrored at random; values are between 0 and 1"
    )
