"""Classes for data sets: `ImageSet`, in memory as float32, and `Arrays`, which converts only the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchmn.errors import DatasetError


class ImageSet(Dataset[tuple[torch.Tensor, int]]):
    """A map-style data set of pairs: `dataset[i]` is `(image, label)`.

    Attributes:
        name: for messages.
        images: (count, channel, height, width), float32 in [0, 1]; `dataset.images[indices]` takes a whole batch.
        labels: (count,), int64.
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


TileSlices = tuple[slice, ...]


@dataclass(frozen=True)
class Arrays:
    """Inputs and targets of one split of a data set.

    Attributes:
        name: for messages.
        inputs: (count, ...), bytes or floats; memory-mapped if possible, so that only requested samples are read, and
            the ranks of one host share the memory.
        targets: (count,) int64 labels, or (count, ...) float values.
        scale: factor by which `take` multiplies inputs.
        classes: names of the labels, if they have names.
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
        self, rows: np.ndarray, dtype: torch.dtype = torch.float32, region: TileSlices | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the samples at `rows` and their targets.

        Args:
            rows: (batch,), indices of samples.
            dtype: of the result; integer targets keep their dtype.
            region: a slice for each of the last dims of a sample, if only a part is needed.

        Returns:
            Inputs (batch, ...) and targets (batch, ...).
        """
        index = (rows, *([slice(None)] * (self.inputs.ndim - 1 - len(region)) if region else ()), *(region or ()))
        taken = torch.from_numpy(np.ascontiguousarray(self.inputs[index]))
        # Via float32, so that values are the same for all dtypes.
        values = taken.to(torch.float32) if self.inputs.dtype != np.float64 else taken
        if self.scale != 1.0:
            values = values * self.scale
        targets = torch.from_numpy(np.ascontiguousarray(self.targets[rows]))
        return values.to(dtype), targets.to(dtype) if targets.is_floating_point() else targets

    def sampled(self, share: float, seed: int) -> Arrays:
        """Returns the fraction `share` of the samples, at least one, chosen by `seed`; their order is kept."""
        count = max(1, round(len(self) * share))
        return self.only(np.sort(np.random.default_rng(seed).choice(len(self), count, replace=False)))

    def parted(self, share: float, seed: int, name: str = "validation") -> tuple[Arrays, Arrays]:
        """Returns the samples without a fraction `share` of them, chosen by `seed`, and that part, called `name`."""
        count = round(len(self) * share)
        if not 0 < count < len(self):
            raise DatasetError(f"{self.name}: {share:.3g} of {len(self)} samples for {name} leaves one part empty")
        held_out = np.zeros(len(self), dtype=bool)
        held_out[np.random.default_rng([seed, 1]).choice(len(self), count, replace=False)] = True
        return self.only(np.flatnonzero(~held_out)), self.only(
            np.flatnonzero(held_out), self.name.replace("train", name)
        )

    def only(self, rows: np.ndarray, name: str | None = None) -> Arrays:
        """Returns the samples at `rows`."""
        return Arrays(name or self.name, self.inputs[rows], self.targets[rows], self.scale, self.classes)


def labels(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns `values` as int64."""
    return np.asarray(values).astype(np.int64)
