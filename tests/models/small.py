"""A small sparse autoencoder and digits for it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn.datasets import mnist
from torchmn.models import LabelledBatches, SparseAutoencoder


def small_model(**changes) -> SparseAutoencoder:
    """Two stacks on images of 10 x 9, float64."""
    torch.manual_seed(5)
    sizes = {"stacks": 2, "in_size": (10, 9), "maps": 3, "kernel": (3, 2), "pool": 2, "classes": 4}
    return SparseAutoencoder(**sizes | {"dtype": torch.float64} | changes)


def small_images(count: int = 4, size: tuple[int, int] = (10, 9)) -> Tensor:
    torch.manual_seed(6)
    return torch.rand(count, 1, *size, dtype=torch.float64)


def small_digits(count: int, batch_size: int) -> LabelledBatches:
    """The middle of the first digits of the sample, every second pixel: 12 x 11."""
    digits = mnist("train")
    return LabelledBatches(digits.images[:count, :, 2:26:2, 3:25:2].double(), digits.labels[:count], batch_size)
