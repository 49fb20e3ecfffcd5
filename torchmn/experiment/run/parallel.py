"""Parallelizes the model of an experiment.

A mode determines which samples of a batch, and which region of each, this rank takes. The trainer depends on nothing
else of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.datasets.arrays import TileSlices
from torchmn.errors import ExperimentError, MismatchError, PeerError, TorchMNError, WaitTimeout
from torchmn.experiment.run import grids
from torchmn.experiment.run.grids import GridError, Shape, Sizes
from torchmn.experiment.vocabulary.schema import Experiment
from torchmn.experiment.vocabulary.scores import Outputs
from torchmn.geometry import owned
from torchmn.modes import MODES, mode_of
from torchmn.optim import create_multi_node_optimizer
from torchmn.parallel import parallelize

FATAL_ERRORS = (PeerError, MismatchError, WaitTimeout)
"""Errors of communication between ranks; they do not mean that a mode is impossible."""


@dataclass
class PlacedModel:
    """A model on the ranks of a communicator.

    Attributes:
        model: this rank's model.
        comm: all ranks.
        replicas: the ranks among which each batch is divided.
        mode: name of the mode, or "one rank".
        sizes: number of ranks along each axis of the grid.
        region: slices of each sample that this rank takes; None for the whole sample.
        grid: the process grid; None on one rank.
    """

    model: nn.Module
    comm: Communicator
    replicas: Communicator
    mode: str
    sizes: Sizes = field(default_factory=dict)
    region: TileSlices | None = None
    grid: ProcessGrid | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether this rank may hold only shards of some weights."""
        return self.replicas.size != self.comm.size

    @property
    def description(self) -> str:
        """Number of ranks, mode and grid as text: "4 ranks, spatial parallel, 2 x 2 (height x width)"."""
        if self.comm.size == 1:
            return "1 rank"
        mode = mode_of(self.mode)
        is_divided_once = mode.divides in (("samples",), ("vectors",))
        grid = "" if is_divided_once else f", {grids.description(self.sizes, self.mode)}"
        return f"{self.comm.size} ranks, {mode.title}{grid}"

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns an optimizer that reduces the gradients of all ranks before each step."""
        if self.comm.size == 1:
            return optimizer
        return create_multi_node_optimizer(optimizer, self.comm, model=self.model)

    def forward(self, inputs: Tensor) -> Outputs:
        """Returns the model's outputs for this rank's part of a batch."""
        outputs = self.model(inputs)
        return Outputs(outputs) if isinstance(outputs, Tensor) else Outputs(outputs[0], tuple(outputs[1:]))

    def backward(self, loss: Tensor) -> None:
        """Computes the gradients of the mean loss of the whole batch, of which `loss` is this rank's part."""
        # The optimizer averages gradients over replicas, where the parts of the loss are to be summed.
        (loss if self.replicas.size == 1 else loss * self.replicas.size).backward()

    def reduce_loss(self, loss: float, stop: bool) -> tuple[float, bool]:
        """Returns the loss of the whole batch, and whether `stop` is True on any rank."""
        if self.comm.size == 1:
            return loss, stop
        local = torch.tensor([loss / (self.comm.size // self.replicas.size), float(stop)], dtype=torch.float64)
        total, stops = self.comm.allreduce(local).tolist()
        return total, stops > 0


def place(model: nn.Module, comm: Communicator, experiment: Experiment, shape: Shape) -> PlacedModel:
    """Parallelizes `model` over the ranks of `comm` in the experiment's mode. Every rank must call it.

    Args:
        model: the same on every rank.
        comm: the ranks.
        experiment: with mode and grid.
        shape: of one sample.

    Raises:
        ExperimentError: on every rank, if the mode is not possible; the message lists modes that are.
    """
    if comm.size == 1:
        return PlacedModel(model, comm, comm, "one rank")
    grids.check(experiment, comm.size, shape)
    mode, sizes = grids.sizes_for(experiment.parallel_section(), comm.size, shape)
    try:
        return place_on_grid(model, comm, mode, sizes, shape)
    except FATAL_ERRORS:
        raise
    except TorchMNError as error:
        possible = [other.flag for name, other in MODES.items() if name != mode and _works(model, comm, name, shape)]
        advice = f" Possible modes: {', '.join(possible)}." if possible else ""
        raise ExperimentError(f"{mode} is not possible: {str(error).rstrip('.')}.{advice}") from error


def place_on_grid(model: nn.Module, comm: Communicator, mode: str, sizes: Sizes, shape: Shape) -> PlacedModel:
    """Parallelizes `model` over a grid of all ranks of `comm`."""
    grid = ProcessGrid(comm, sizes["data"], sizes["depth"], sizes["height"], sizes["width"])
    parallel = parallelize(model, grid, "modelpar" if mode == "hybrid" else mode, input_shape=shape)
    region = None
    if mode_of(mode).cuts_images:
        dims = len(shape) - 1
        positions = zip(shape[1:], grid.parts_of(dims), grid.place_of(dims), strict=True)
        intervals = [owned(extent, parts, index) for extent, parts, index in positions]
        region = tuple(slice(interval.start, interval.stop) for interval in intervals)
    return PlacedModel(parallel, comm, grid.replicas, mode, sizes, region, grid)


def _works(model: nn.Module, comm: Communicator, mode: str, shape: Shape) -> bool:
    """Returns whether another mode is possible; the same on all ranks."""
    try:
        place_on_grid(model, comm, mode, grids.grid_for(mode, comm.size, shape, {}), shape)
    except FATAL_ERRORS:
        raise
    except (GridError, TorchMNError):
        return False
    return True
