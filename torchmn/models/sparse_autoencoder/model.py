"""SparseAutoencoder: a stack of sparse autoencoders of local filters, with a classifier on top."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchmn.errors import ArgumentError
from torchmn.models.sparse_autoencoder import tiles
from torchmn.nn.local_filters.batch_last import as_batch_last
from torchmn.nn.local_filters.contrast_norm import LocalContrastNorm2d
from torchmn.nn.local_filters.image_sizes import Size, count, pair
from torchmn.nn.local_filters.l2_pool import L2Pool2d
from torchmn.nn.local_filters.local_filter import LocalFilter2d
from torchmn.sharded.tensor import ShardedTensor


class Stack(nn.Module):
    """Local filters, L2 pooling and local contrast normalisation.

    Args:
        filters: the local filters.
        pool: the pooling of their outputs.
        norm: the normalisation of the pooled outputs.
    """

    def __init__(self, filters: LocalFilter2d, pool: L2Pool2d, norm: LocalContrastNorm2d) -> None:
        super().__init__()
        self.filter = filters
        self.pool = pool
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Returns the stack's features, (batch, maps, height, width), from those of the stack below or the image."""
        return self.norm(self.pool(self.filter(x)))

    def reconstruct(self, x: Tensor) -> Tensor:
        """Returns the reconstruction of the stack's input `x` by the decoder, of the same shape."""
        return self.filter.transpose(self.filter(x))


class SparseAutoencoder(nn.Module):
    """[local filters → L2 pooling → local contrast normalisation] × `stacks` → a logistic classifier.

    The default is the MNIST network of `configurations.MNIST`: 28 → 25 → 23 → 21 → 19 → 17 → 15, 8 maps, 1800 features.
    `pretrain` and `fine_tune` train it. It can also be trained by other loops, which must call `unit_norm_` after each
    step.

    Args:
        stacks: number of stacks.
        in_maps: number of maps of the images.
        in_size: (height, width) of the images.
        maps: number of maps of every stack.
        kernel: of the filters: one for all stacks, or a list with one per stack.
        pool: window of the pooling, with stride 1.
        norm: window of the normalisation, with stride 1.
        classes: number of classes.
        tied: whether the decoders use the filters of the encoders.
        sparsity: the weight λ of the pooled outputs in the cost of pretraining, ½‖x̂ - x‖² + λ·Σ pooled.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        stacks: an `nn.ModuleList` of `Stack`.
        feature_shape: (maps, height, width) of the features.
        classifier: an `nn.Linear` from the flattened features to the classes.

    Raises:
        ArgumentError: if an argument is wrong, or the images are too small for the windows.
    """

    stacks: Sequence[Stack]

    def __init__(
        self,
        stacks: int = 3,
        *,
        in_maps: int = 1,
        in_size: Size = 28,
        maps: int = 8,
        kernel: Size | Sequence[Size] = (4, 3, 3),
        pool: Size = 3,
        norm: Size = 3,
        classes: int = 10,
        tied: bool = True,
        sparsity: float = 0.1,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        count("SparseAutoencoder", "stacks", stacks)
        factory = {"device": device, "dtype": dtype}
        size = pair("SparseAutoencoder", "in_size", in_size)
        self.sparsity = float(sparsity)
        made_stacks = []
        for number, window in enumerate(_kernels(kernel, stacks)):
            filters = LocalFilter2d(maps if number else in_maps, maps, window, 1, size, tied=tied, **factory)
            pooling = L2Pool2d(pool, 1)
            size = filters.out_size[0] - pooling.kernel[0] + 1, filters.out_size[1] - pooling.kernel[1] + 1
            if min(size) < 1:
                raise ArgumentError(
                    f"SparseAutoencoder: an image of {in_size} is too small for the pooling of stack {number + 1} of "
                    f"{stacks}. Use fewer stacks, smaller windows, or larger images."
                )
            made_stacks.append(Stack(filters, pooling, LocalContrastNorm2d(norm, maps, **factory)))
        self.stacks = cast(Sequence[Stack], nn.ModuleList(made_stacks))
        self.feature_shape = (maps, *size)
        self.classifier = nn.Linear(maps * size[0] * size[1], classes, bias=False, **factory)
        nn.init.uniform_(self.classifier.weight, -0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of each class, (batch, classes), from x: (batch, in_maps, *in_size)."""
        return self.classifier(self.features(x).flatten(1))

    def features(self, x: Tensor, stacks: int | None = None) -> Tensor:
        """Returns the outputs of the first `stacks` stacks, by default of all: (batch, maps, height, width)."""
        chosen = self.stacks[:stacks]
        if chosen and isinstance(x, ShardedTensor) and tiles.runs_on_tiles(self, x):
            return tiles.features(self, x, len(chosen))
        if not isinstance(x, ShardedTensor):
            x = as_batch_last(x)  # all layers keep this memory format
        for stack in chosen:
            x = stack(x)
        return x

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """(maps, height, width) of a whole image."""
        first = self.stacks[0].filter
        return first.in_maps, *first.in_size

    def unit_norm_(self) -> SparseAutoencoder:
        """Divides every filter of every stack by its L2 norm, and returns the model."""
        for stack in self.stacks:
            stack.filter.unit_norm_()
        return self


def _kernels(kernel: Any, stacks: int) -> list[Any]:
    """Returns one kernel per stack."""
    if isinstance(kernel, tuple | list):
        if len(kernel) != stacks:
            raise ArgumentError(
                f"SparseAutoencoder: expected kernel to be one number or a list of {stacks}, one per stack, got "
                f"{kernel!r}. A kernel that is not square is a pair inside that list."
            )
        return list(kernel)
    return [kernel] * stacks
