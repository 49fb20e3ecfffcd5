"""For which images a model is made: found by trying, so that users need not say it."""

from __future__ import annotations

import torch
from torch import nn

# Sizes that data sets have come first: the first that fits wins.
_SIZES = (32, 28, 64, 96, 128, 224, 256, 227, 299, 512, *range(1, 300))
_IMAGE_LAYERS = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}


def candidates(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of one sample that the first layer of `model` could take: a vector's, or a square image's in each size."""
    for module in model.modules():
        dims = next((dims for kind, dims in _IMAGE_LAYERS.items() if isinstance(module, kind)), None)
        if dims is not None:
            sizes = _SIZES if dims < 3 else tuple(size for size in _SIZES if size <= 64)
            return [(module.in_channels, *[size] * dims) for size in sizes]  # type: ignore[list-item]
        if isinstance(module, nn.Linear):
            return [(module.in_features,)]
        if isinstance(module, nn.Embedding):
            return [(8,)]
        takes_image = getattr(module, "in_maps", None), getattr(module, "in_size", None)
        if None not in takes_image:  # a local filter knows its image
            maps, size = takes_image
            return [(maps, *([size] * 2 if isinstance(size, int) else size))]  # type: ignore[list-item, misc]
    return []


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the inputs of a model: indices where it begins with an embedding, else what it computes in."""
    first = next((m for m in model.modules() if list(m.parameters(recurse=False))), None)
    if isinstance(first, nn.Embedding):
        return torch.int64
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
