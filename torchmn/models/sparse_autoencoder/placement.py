"""Where the images and the copies of a model lie: all here, or on the grid of a parallel model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchmn.communicators.process_grid import ProcessGrid
from torchmn.errors import ArgumentError, ParallelizeError
from torchmn.optim import create_multi_node_optimizer
from torchmn.sharded.redistribute import part_of
from torchmn.sharded.sharding import Samples, image_layout
from torchmn.sharded.tensor import wrap


class Placement:
    """The grid of a model that went through `parallelize`, and what its training needs of it; none on one rank.

    in_shape: of one whole image, (maps, height, width)
    """

    def __init__(self, model: nn.Module, in_shape: tuple[int, int, int]) -> None:
        parallelism: Any = getattr(model, "parallelism", None)
        self.grid: ProcessGrid | None = parallelism.grid if parallelism else None
        self.cuts_images = bool(parallelism) and parallelism.cuts_images
        self.in_shape = in_shape
        self._model, self._parallelism = model, parallelism

    def part(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """`images`, whole or this rank's tiles of them, as the layers of the model take them.

        Whole images, and labels, must be the same on all ranks that share images: an error on each if they are not.
        """
        if not self.cuts_images and (images.dim() != 4 or tuple(images.shape[1:]) != self.in_shape):
            raise ArgumentError(
                f"expected images (batch, {', '.join(map(str, self.in_shape))}), got {tuple(images.shape)}. Local "
                "filters belong to places of the image: SparseAutoencoder(in_maps=..., in_size=(height, width))"
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
        return part_of(images, layout) if self.cuts_images else images

    def agree(self, operation: str, problem: str | None = None, **values: Any) -> None:
        """Raise on every rank if one of them has a problem, or if they do not all have the same values."""
        if self.grid is None:
            if problem:
                raise ArgumentError(f"{operation}: {problem}")
            return
        self.grid.comm.agree(operation, problem, **values)

    def sum_over_copies(self, values: Tensor) -> Tensor:
        """The sum of what the ranks have that hold the same part of the model and other images."""
        if self.grid is None or self.grid.replicas.size == 1:
            return values
        return self.grid.replicas.allreduce(values)

    def sum_over_all(self, values: Tensor) -> Tensor:
        """The sum of what all ranks have that hold other images, or other parts of the same images."""
        if self.grid is None or not self.cuts_images:
            return self.sum_over_copies(values)
        return self.grid.comm.allreduce(values)

    @property
    def is_first_tile(self) -> bool:
        """Whether this rank counts what all tiles of an image have."""
        return self.grid is None or not self.cuts_images or self.grid.tiles.rank == 0

    def any_rank(self, here: bool) -> bool:
        """Whether it is so on any rank; all must ask."""
        return here if self.grid is None else bool(self.grid.comm.allreduce(torch.tensor(int(here))).item())

    def of_all_copies(self, rows: Tensor) -> Tensor:
        """The rows of all ranks that hold the same part of the model, one below the other."""
        if self.grid is None or self.grid.replicas.size == 1:
            return rows
        return torch.cat(list(self.grid.replicas.allgather(rows)))

    def of_all_tiles(self, values: list[Any]) -> list[Any]:
        """The values of all ranks that hold a part of the same images."""
        if not self.cuts_images or self.grid is None:
            return values
        return [value for part in self.grid.tiles.allgather_obj(values) for value in part]

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """An optimizer whose `step(weight=images)` is one of all ranks."""
        return (
            _OneRank(optimizer) if self.grid is None else create_multi_node_optimizer(optimizer, self.grid, model=model)
        )


class _OneRank:
    """An optimizer that is asked for a weighted step, where there is nothing to weigh."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.param_groups, self.zero_grad, self._step = optimizer.param_groups, optimizer.zero_grad, optimizer.step

    def step(self, *, weight: float) -> None:
        self._step()
