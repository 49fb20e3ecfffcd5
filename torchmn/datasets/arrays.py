"""A data set as two arrays, as they lie in its files: bytes stay bytes until a batch is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchmn.errors import DatasetError


class ImageSet(Dataset[tuple[torch.Tensor, int]]):
    """Pairs of image and label: `dataset[i]` is `(image, label)`, `len(dataset)` how many there are.

    images: (count, channel, height, width), float32 in [0, 1]
    labels: (count,), int64

    Both tensors are public: `dataset.images[indices]` takes a whole batch at once.
    """

    def __init__(self, name: str, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.name = name
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])

    def __repr__(self) -> str:
        shape = "x".join(str(extent) for extent in self.images.shape[1:])
        return f"ImageSet({self.name}: {len(self)} images of {shape})"


Region = tuple[slice, ...]


@dataclass(frozen=True)
class Arrays:
    """Inputs and targets of one split.

    inputs: (count, ...), bytes or floats; a file mapped into memory where that is possible, so that only what is
        taken is read, and ranks of one machine share it
    targets: (count,) int64 labels, or (count, ...) float values
    scale: by what inputs are multiplied when they are taken
    classes: the names of the labels, where they have any
    """

    name: str
    inputs: np.ndarray
    targets: np.ndarray
    scale: float = 1.0
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.inputs.shape[1:])

    def take(
        self, rows: np.ndarray, dtype: torch.dtype = torch.float32, region: Region | None = None
    ) -> tuple[Tensor, Tensor]:
        """The samples at `rows` and their targets; of each sample only the `region`, a slice for each last dim."""
        place = (rows, *([slice(None)] * (self.inputs.ndim - 1 - len(region)) if region else ()), *(region or ()))
        taken = torch.from_numpy(np.ascontiguousarray(self.inputs[place]))
        # As float32 first: the same values as in a run in float32, whatever the dtype.
        values = taken.to(torch.float32) if self.inputs.dtype != np.float64 else taken
        if self.scale != 1.0:
            values = values * self.scale
        targets = torch.from_numpy(np.ascontiguousarray(self.targets[rows]))
        return values.to(dtype), targets.to(dtype) if targets.is_floating_point() else targets

    def sampled(self, share: float, seed: int) -> Arrays:
        """A share of the samples, chosen by `seed`, in their order; at least one."""
        count = max(1, round(len(self) * share))
        return self.only(np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False)))

    def parted(self, share: float, seed: int, name: str = "validation") -> tuple[Arrays, Arrays]:
        """The samples without a share of them, chosen by `seed`, and that share, named after `name`."""
        count = round(len(self) * share)
        if not 0 < count < len(self):
            raise DatasetError(f"{self.name}: {share:.3g} of {len(self)} samples for {name} leaves one part empty")
        held_out = np.zeros(len(self), dtype=bool)
        held_out[np.random.default_rng([seed, 1]).choice(len(self), count, replace=False)] = True
        return self.only(np.flatnonzero(~held_out)), self.only(
            np.flatnonzero(held_out), self.name.replace("train", name)
        )

    def only(self, rows: np.ndarray, name: str | None = None) -> Arrays:
        """The samples at `rows`."""
        return Arrays(name or self.name, self.inputs[rows], self.targets[rows], self.scale, self.classes)


def labels(values: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(values).astype(np.int64)
