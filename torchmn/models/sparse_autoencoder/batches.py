"""LabelledBatches: batches of labelled images, for several epochs; and checks of batches of other types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from torchmn.errors import ArgumentError

Batches = Iterable[Any]  # of (images, labels), or of images


class LabelledBatches:
    """Consecutive batches of images and their labels; the last one may be smaller.

    Args:
        images: (count, map, height, width).
        labels: (count,).
        batch_size: samples in a batch.

    Raises:
        ArgumentError: if there are not equally many images and labels.
    """

    def __init__(self, images: Tensor, labels: Tensor, batch_size: int) -> None:
        if len(images) != len(labels):
            raise ArgumentError(
                f"LabelledBatches: expected one label per image, got {len(images)} images and {len(labels)} labels"
            )
        self.images, self.labels, self.batch_size = images, labels, batch_size

    def __len__(self) -> int:
        return -(-len(self.images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.images), self.batch_size):
            chosen = slice(start, start + self.batch_size)
            yield self.images[chosen], self.labels[chosen]


def iterator_problem(batches: Batches) -> str | None:
    """Returns an error if `batches` is an iterator, which would be empty in the second epoch; else None."""
    if iter(batches) is not batches:
        return None
    return (
        "expected batches that can be iterated once per epoch, such as a list or a DataLoader, got the iterator "
        f"{type(batches).__name__}, which would be empty in the second epoch"
    )


def images_of(batch: Any) -> Tensor:
    """Returns the images of a batch with or without labels."""
    return batch if isinstance(batch, Tensor) else batch[0]


def labels_of(batch: Any) -> Tensor | None:
    """Returns the labels of a batch; None if it has none."""
    labels = None if isinstance(batch, Tensor) or len(batch) < 2 else batch[1]
    return labels if isinstance(labels, Tensor) else None
