"""The sparse autoencoder of local filters ("GB"): pretrained stack by stack without labels, then fine-tuned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchmn.errors import ArgumentError
from torchmn.models.sparse_autoencoder import tiles
from torchmn.nn.local_filters.batch_last import as_batch_last
from torchmn.nn.local_filters.contrast_norm import LocalContrastNorm2d
from torchmn.nn.local_filters.l2_pool import L2Pool2d
from torchmn.nn.local_filters.local_filter import LocalFilter2d
from torchmn.nn.local_filters.pair import Size, count, pair
from torchmn.sharded.tensor import ShardedTensor


class Stack(nn.Module):
    """Local filters, L2 pooling, local contrast normalisation: one third of the network."""

    def __init__(self, filters: LocalFilter2d, pool: L2Pool2d, norm: LocalContrastNorm2d) -> None:
        super().__init__()
        self.filter = filters
        self.pool = pool
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """The stack's features, (batch, maps, height, width), from the features of the stack below or the image."""
        return self.norm(self.pool(self.filter(x)))

    def reconstruct(self, x: Tensor) -> Tensor:
        """What the decoder makes of the filters' outputs: as large as the stack's input `x`."""
        return self.filter.transpose(self.filter(x))


class SparseAutoencoder(nn.Module):
    """[local filters → L2 pooling → local contrast normalisation] × `stacks` → a logistic classifier.

    kernel: of each stack's filters: one for all, or a list with one per stack
    maps: of every stack; pool, norm: the windows of pooling and of normalisation, both with stride 1
    tied: the decoders share the filters
    sparsity: the weight λ of the pooled outputs in the cost of pretraining, ½‖x̂ - x‖² + λ·Σ pooled

    The default is the MNIST network of `configurations.MNIST`: 28 → 25 → 23 → 21 → 19 → 17 → 15, 8 maps, 1800 features.
    `pretrain` and `fine_tune` train it; all of it is also an ordinary module for ordinary training loops, which call
    `unit_norm_` after each step.
    """

    stacks: Sequence[Stack]  # an nn.ModuleList, which does not know what it holds

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
        made = {"device": device, "dtype": dtype}
        size = pair("SparseAutoencoder", "in_size", in_size)
        self.sparsity = float(sparsity)
        made_stacks = []
        for number, window in enumerate(_kernels(kernel, stacks)):
            filters = LocalFilter2d(maps if number else in_maps, maps, window, 1, size, tied=tied, **made)
            pooling = L2Pool2d(pool, 1)
            size = filters.out_size[0] - pooling.kernel[0] + 1, filters.out_size[1] - pooling.kernel[1] + 1
            if min(size) < 1:
                raise ArgumentError(
                    f"SparseAutoencoder: nothing is left of an image of {in_size} after the pooling of stack "
                    f"{number + 1} of {stacks}. Use fewer stacks, smaller windows, or larger images."
                )
            made_stacks.append(Stack(filters, pooling, LocalContrastNorm2d(norm, maps, **made)))
        self.stacks = nn.ModuleList(made_stacks)  # type: ignore[assignment]
        self.feature_shape = (maps, *size)
        self.classifier = nn.Linear(maps * size[0] * size[1], classes, bias=False, **made)
        nn.init.uniform_(self.classifier.weight, -0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of each class, (batch, classes), from x: (batch, in_maps, *in_size)."""
        return self.classifier(self.features(x).flatten(1))

    def features(self, x: Tensor, stacks: int | None = None) -> Tensor:
        """The outputs of the first `stacks` stacks, of all if not given: (batch, maps, height, width)."""
        chosen = self.stacks[:stacks]
        if chosen and tiles.runs_on_tiles(self, x):
            return tiles.features(self, x, len(chosen))  # type: ignore[arg-type]  (a ShardedTensor)
        if not isinstance(x, ShardedTensor):
            x = as_batch_last(x)  # all layers keep it so
        for stack in chosen:
            x = stack(x)
        return x

    @property
    def in_shape(self) -> tuple[int, int, int]:
        """(maps, height, width) of an image, the whole of it."""
        first = self.stacks[0].filter
        return first.in_maps, *first.in_size

    def unit_norm_(self) -> SparseAutoencoder:
        """Divide every filter of every stack by its L2 norm."""
        for stack in self.stacks:
            stack.filter.unit_norm_()
        return self


def _kernels(kernel: Any, stacks: int) -> list[Any]:
    """One kernel per stack. A tuple or list of as many kernels as there are stacks is one for each."""
    if isinstance(kernel, tuple | list):
        if len(kernel) != stacks:
            raise ArgumentError(
                f"SparseAutoencoder: expected kernel to be one number or a list of {stacks}, one per stack, got "
                f"{kernel!r}. A kernel that is not square is a pair inside that list."
            )
        return list(kernel)
    return [kernel] * stacks
