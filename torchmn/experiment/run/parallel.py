"""How an experiment's model is put on ranks.

A mode decides which samples of a batch this rank takes and which region of each. The trainer knows nothing else of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.datasets.arrays import Region
from torchmn.errors import ExperimentError, MismatchError, PeerError, TorchMNError, WaitTimeout
from torchmn.experiment.run import grids
from torchmn.experiment.run.grids import Shape, Sizes, Unfit
from torchmn.experiment.vocabulary.schema import Experiment
from torchmn.experiment.vocabulary.scores import Outputs
from torchmn.geometry import owned
from torchmn.modes import MODES, mode_of
from torchmn.optim import create_multi_node_optimizer
from torchmn.parallel import parallelize

LOST = (PeerError, MismatchError, WaitTimeout)
"""Errors of ranks that do not find each other any more: they say nothing about a mode."""


@dataclass
class Placed:
    """A model on this rank's place.

    replicas: the ranks among which each batch is divided; this rank's place there says which samples are its own
    region: which part of each sample this rank takes, or None for all of it
    """

    model: nn.Module
    comm: Communicator
    replicas: Communicator
    mode: str
    sizes: Sizes = field(default_factory=dict)
    region: Region | None = None
    grid: ProcessGrid | None = None

    @property
    def is_cut(self) -> bool:
        """Whether this rank may hold only a part of some weights."""
        return self.replicas.size != self.comm.size

    @property
    def description(self) -> str:
        return (
            "1" if self.comm.size == 1 else f"{self.comm.size}, {self.mode}, {grids.described(self.sizes, self.mode)}"
        )

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """`optimizer`, stepping with the gradients of all ranks."""
        if self.comm.size == 1:
            return optimizer
        return create_multi_node_optimizer(optimizer, self.comm, model=self.model)

    def forward(self, inputs: Tensor) -> Outputs:
        """The model's outputs for this rank's part of a batch."""
        made = self.model(inputs)
        return Outputs(made) if isinstance(made, Tensor) else Outputs(made[0], tuple(made[1:]))

    def backward(self, loss: Tensor) -> None:
        """Gradients of the mean loss of the whole batch, of which `loss` is the part of this rank's samples."""
        # The optimizer takes the mean over ranks of gradients that should be summed over replicas.
        (loss * self.replicas.size).backward()

    def joined(self, loss: float, stop: bool) -> tuple[float, bool]:
        """The loss of the whole batch, from each rank's part of it, and whether any rank wants to stop."""
        told = torch.tensor([loss / (self.comm.size // self.replicas.size), float(stop)], dtype=torch.float64)
        total, stops = self.comm.allreduce(told).tolist()
        return total, stops > 0


def place(model: nn.Module, comm: Communicator, experiment: Experiment, shape: Shape) -> Placed:
    """`model` on the ranks of `comm` as the experiment says; an ExperimentError on all ranks where that can not be."""
    if comm.size == 1:
        return Placed(model, comm, comm, "one rank")
    grids.check(experiment, comm.size, shape)
    mode, sizes = grids.sizes_for(experiment.the_parallel(), comm.size, shape)
    try:
        return place_in(model, comm, mode, sizes, shape)
    except LOST:
        raise
    except TorchMNError as error:
        others = [known.flag for name, known in MODES.items() if name != mode and _works(model, comm, name, shape)]
        would = f" These modes would: {', '.join(others)}." if others else ""
        raise ExperimentError(f"{mode} is not possible: {str(error).rstrip('.')}.{would}") from error


def place_in(model: nn.Module, comm: Communicator, mode: str, sizes: Sizes, shape: Shape) -> Placed:
    """`model` on a grid of all ranks of `comm`."""
    grid = ProcessGrid(comm, sizes["data"], sizes["depth"], sizes["height"], sizes["width"])
    parallel = parallelize(model, grid, "modelpar" if mode == "hybrid" else mode, input_shape=shape)
    region = None
    if mode_of(mode).cuts_images:
        dims = len(shape) - 1
        places = zip(shape[1:], grid.parts_of(dims), grid.place_of(dims), strict=True)
        intervals = [owned(extent, parts, at) for extent, parts, at in places]
        region = tuple(slice(interval.start, interval.stop) for interval in intervals)
    return Placed(parallel, comm, grid.replicas, mode, sizes, region, grid)


def _works(model: nn.Module, comm: Communicator, mode: str, shape: Shape) -> bool:
    """Whether another mode is possible; all ranks find the same."""
    try:
        place_in(model, comm, mode, grids.grid_for(mode, comm.size, shape, {}), shape)
    except LOST:
        raise
    except (Unfit, TorchMNError):
        return False
    return True
