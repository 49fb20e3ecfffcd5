"""Classes for data sets: `ImageSet`, in memory as float32, and `Arrays`, which converts only the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchmn.errors import DatasetError


class ImageSet(Dataset[tuple[torch.Tensor, int]]):
    """A map-style data set of pairs: `dataset[i]` is `(image, label)`.

    Args:
        name: for messages.
        images: (count, channel, height, width).
        labels: (count,).

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
        offset: values that `take` subtracts before, of the shape of a sample; None for 0.
        classes: names of the labels, if they have names.
    """

    name: str
    inputs: np.ndarray
    targets: np.ndarray
    scale: float = 1.0
    classes: tuple[str, ...] = ()
    offset: np.ndarray | None = None

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
        where = _slice_of(rows)
        part = (*([slice(None)] * (self.inputs.ndim - 1 - len(region)) if region else ()), *(region or ()))
        taken = _copied(self.inputs, (where, *part))
        # Via float32, so that values are the same for all dtypes.
        values = taken if self.inputs.dtype == np.float64 else taken.to(torch.float32)
        if self.offset is not None:
            values = values - torch.from_numpy(np.ascontiguousarray(self.offset[part]))
        if self.scale != 1.0:
            values.mul_(self.scale)
        targets = _copied(self.targets, where)
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
        return replace(self, name=name or self.name, inputs=self.inputs[rows], targets=self.targets[rows])


def _slice_of(rows: Any) -> Any:
    """Returns an array of consecutive rows as a slice, which NumPy copies faster; any other index as it is."""
    if not isinstance(rows, np.ndarray) or rows.dtype.kind != "i" or rows.ndim != 1 or not len(rows):
        return rows
    if rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _copied(values: np.ndarray, index: Any) -> Tensor:
    """Returns a copy of the elements at `index`."""
    found = np.asarray(values)[index]  # a memory map itself is slow to index
    return torch.from_numpy(np.array(found, order="C") if found.base is not None else np.ascontiguousarray(found))


def labels(values: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns `values` as int64."""
    return np.asarray(values).astype(np.int64)
