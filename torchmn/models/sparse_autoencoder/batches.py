"""Batches of labelled images that can be gone through once per epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from torchmn.errors import ArgumentError

Batches = Iterable[Any]  # of (images, labels), or of images


class LabelledBatches:
    """Consecutive batches of `batch_size` of images and their labels, the last one with what is left.

    images: (count, map, height, width); labels: (count,)
    """

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int) -> None:
        if len(images) != len(labels):
            raise ArgumentError(f"LabelledBatches: {len(images)} images, but {len(labels)} labels")
        self.images, self.labels, self.batch_size = images, labels, batch_size

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.images), self.batch_size):
            chosen = slice(start, start + self.batch_size)
            yield self.images[chosen], self.labels[chosen]


def iterator_problem(batches: Batches) -> str | None:
    """Why `batches` will not do: an iterator would be empty in the second epoch."""
    if iter(batches) is not batches:
        return None
    return (
        "expected batches that can be gone through once per epoch, such as a list or a DataLoader, got the iterator "
        f"{type(batches).__name__}, which would be empty in the second epoch"
    )


def images_of(batch: Any) -> Tensor:
    """The images of a batch, which may have labels beside them."""
    return batch if isinstance(batch, Tensor) else batch[0]


def labels_of(batch: Any) -> Tensor | None:
    """The labels beside the images of a batch, if it has any."""
    labels = None if isinstance(batch, Tensor) or len(batch) < 2 else batch[1]
    return labels if isinstance(labels, Tensor) else None
