"""neon's data sets, in our words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.neon.said import Range, Said, at
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
    for key, name in (("sample_pct", "train_sample"), ("validation_pct", "validation"), ("test_pct", "test")):
        share = said.get(key)
        if share is not None and share.value not in (0, 100) and (name != "test" or ours["name"] == "housing"):
            ours[name] = share if isinstance(share.value, Range) else Said(f"{share.value}%", share.where)
    _path(said, ours, notes)
    if (path := said.get("serialized_path")) is not None:
        notes.append(f"{path.where}: serialized_path: data is cached by its content, and each rank reads only its part")
    if (found := said.get("num_test_sample")) is not None:
        notes.append(f"{found.where}: num_test_sample is ignored: all test samples are used, at any number of ranks")
    if ours["name"] == "random":
        sides = [said.plain(key) for key in ("nin", "nout", "ntrain", "ntest")]
        ours |= {
            "shape": [sides[0] or 10],
            "classes": sides[1] or 10,
            "train": sides[2] or 100,
            "test": sides[3] or 100,
        }
    elif ours["name"] == "images":
        _images(said, ours, notes)
    elif ours["name"] == "text":
        ours["length"] = said.get("unrolls")
    return at(said.where, ours)


def _path(said: Said, ours: dict[str, Any], notes: list[str]) -> None:
    path = said.get("repo_path")
    if path is None:
        return
    folder = Path(str(path.value)).expanduser()
    inside = next((folder / n for n in (said.name, said.name.lower()) if (folder / n).is_dir()), folder)
    if inside.is_dir() and ours["name"] not in WITHOUT_FILES:
        ours["path"] = Said(str(inside), path.where)
    elif ours["name"] in (*WITHOUT_FILES, "mnist"):
        what = "the sample that comes with TorchMN" if ours["name"] == "mnist" else "what comes with TorchMN"
        notes.append(
            f"{path.where}: repo_path {str(path.value)!r} is not there or not needed: {what} is used, or --data DIR"
        )


def _images(said: Said, ours: dict[str, Any], notes: list[str]) -> None:
    """Macro batches were made of a folder for each class, of which neon held a fifth out for validation."""
    if str(said.plain("imageset", "")).upper().startswith("I1K"):
        raise ExperimentError(
            f"{said.where}: Imageset of I1K is not supported: it was made of ImageNet's archives. Unpack these into a "
            "folder for each class, and say `dataset: {name: images, path: DIR, size: [224, 224]}` in our format"
        )
    if (folder := said.get("image_dir")) is not None:
        ours["path"] = folder
    side = said.get("cropped_image_size") or said.get("output_image_size")
    if side is None:
        raise ExperimentError(f"{said.where}: {said.kind} needs the key 'cropped_image_size'")
    ours |= {"size": [side, side], "channels": said.plain("num_channels", 3)}
    ours.setdefault("validation", "20%")
    if "train_sample" in ours:
        del ours["train_sample"]
        notes.append(f"{said.where}: Imageset knew no sample_pct: it is ignored")
    notes.append(
        f"{said.where}: Imageset: images are scaled to cropped_image_size, and neither cropped nor mirrored at random; "
        "macro batches, mean_norm and unit_norm have no meaning today, values are between 0 and 1"
    )
