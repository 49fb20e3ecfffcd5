"""Placement: images, sums and optimizers of a model's training, on one rank or on the grid of a parallel model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ArgumentError, ParallelizeError
from torchmn.optim import create_multi_node_optimizer
from torchmn.sharded.redistribute import shard_of
from torchmn.sharded.sharding import Samples, image_layout
from torchmn.sharded.tensor import wrap


class Placement:
    """The operations of training that depend on the grid of a parallel model; for a plain model, those of one rank.

    Args:
        model: a plain model, or one that `parallelize` returned.
        in_shape: (maps, height, width) of a whole image.
    """

    def __init__(self, model: nn.Module, in_shape: tuple[int, int, int]) -> None:
        parallelism: Any = getattr(model, "parallelism", None)
        self.grid: ProcessGrid | None = parallelism.grid if parallelism else None
        self.cuts_images = bool(parallelism) and parallelism.cuts_images
        self.in_shape = in_shape
        self._model, self._parallelism = model, parallelism

    def shard(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns images as the layers of the model take them: sharded, if the model cuts images.

        Args:
            images: whole images, or this rank's tiles of them.
            labels: of the images.

        Raises:
            ArgumentError: if images have another shape.
            ParallelizeError: if tiles have another shape.
            MismatchError: on every rank, if ranks that share images have different whole images or labels.
        """
        if not self.cuts_images and (images.dim() != 4 or tuple(images.shape[1:]) != self.in_shape):
            raise ArgumentError(
                f"expected images (batch, {', '.join(map(str, self.in_shape))}), got {tuple(images.shape)}. Local "
                "filters belong to positions in the image: SparseAutoencoder(in_maps=..., in_size=(height, width))"
            )
        if self.grid is None:
            return images
        layout = image_layout(self.grid, (images.shape[0], *self.in_shape), Samples(0, images.shape[0]))
        is_tile = self.cuts_images and tuple(images.shape) == layout.local_shape()
        if self.cuts_images and not is_tile and tuple(images.shape) != layout.shape:
            raise ParallelizeError(
                f"rank {self.grid.comm.rank} of {self.grid.comm.size}: expected this rank's tile "
                f"{layout.local_shape()} of the images {layout.shape}, or all of them, got {tuple(images.shape)}. "
                "torchmn.data.scatter_regions gives each rank its tile."
            )
        if not is_tile or labels is not None:
            self._parallelism.compare_whole(self._model, [] if is_tile else [images], labels)
        if is_tile:
            return wrap(images, layout)
        return shard_of(images, layout) if self.cuts_images else images

    def agree(self, operation: str, problem: str | None = None, **values: Any) -> None:
        """Raises an error on every rank if one of them has a problem, or if values differ between ranks."""
        if self.grid is None:
            if problem:
                raise ArgumentError(f"{operation}: {problem}")
            return
        self.grid.comm.agree(operation, problem, **values)

    def sum_over_replicas(self, values: Tensor) -> Tensor:
        """Returns the sum over the ranks with the same shard of the model and different images."""
        if self.grid is None or self.grid.replicas.size == 1:
            return values
        return self.grid.replicas.allreduce(values)

    def sum_over_all(self, values: Tensor) -> Tensor:
        """Returns the sum over all ranks with different images or different tiles."""
        if self.grid is None or not self.cuts_images:
            return self.sum_over_replicas(values)
        return self.grid.comm.allreduce(values)

    @property
    def is_first_tile(self) -> bool:
        """Whether this rank counts values that are the same on all tiles of an image."""
        return self.grid is None or not self.cuts_images or self.grid.tiles.rank == 0

    def any_rank(self, here: bool) -> bool:
        """Whether `here` is true on any rank; all ranks must call it."""
        return here if self.grid is None else bool(self.grid.comm.allreduce(torch.tensor(int(here))).item())

    def of_all_replicas(self, rows: Tensor) -> Tensor:
        """Returns the concatenated rows of all ranks with the same shard of the model."""
        if self.grid is None or self.grid.replicas.size == 1:
            return rows
        return torch.cat(list(self.grid.replicas.allgather(rows)))

    def of_all_tiles(self, values: list[Any]) -> list[Any]:
        """Returns the values of all ranks with tiles of the same images."""
        if not self.cuts_images or self.grid is None:
            return values
        return [value for part in self.grid.tiles.allgather_obj(values) for value in part]

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Returns an optimizer whose `step(weight=...)` averages gradients over ranks, weighted by their samples."""
        return (
            _OneRank(optimizer) if self.grid is None else create_multi_node_optimizer(optimizer, self.grid, model=model)
        )


class _OneRank:
    """An optimizer on one rank, whose `step` ignores the weight."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.zero_grad, self._step = optimizer.param_groups, optimizer.zero_grad, optimizer.step

    def step(self, *, weight: float) -> None:
        self._step()
