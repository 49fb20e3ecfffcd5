"""Labelled images in memory, as a map-style dataset."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset


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
