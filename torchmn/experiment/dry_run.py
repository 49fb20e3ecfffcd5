"""dry_run: one step of an experiment, to see its shapes and the memory of each rank. Nothing is written."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from time import monotonic

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from torchmn.communicators.communicator import Communicator
from torchmn.experiment.report.layer_table import LayerRow, layer_table
from torchmn.experiment.run.model import build_model
from torchmn.experiment.train import checked_session
from torchmn.experiment.vocabulary.layers.options import Shape
from torchmn.experiment.vocabulary.schema import Experiment


@dataclass(frozen=True)
class RankUse:
    """What one rank computes in a step, and the bytes that it needs.

    Attributes:
        inputs: shape of its part of the batch.
        weights: bytes of parameters and buffers.
        gradients: bytes of gradients.
        optimizer: bytes of the optimizer's state.
        activations: bytes of the tensors that forward saves for backward, without parameters.
        process: the largest memory of the process so far, with Python, torch and the data that it has read.
    """

    inputs: Shape
    weights: int
    gradients: int
    optimizer: int
    activations: int
    process: int


@dataclass(frozen=True)
class DryRun:
    """The first step of an experiment.

    Attributes:
        mode: number of ranks, mode and grid as text.
        samples: number of samples of the step, on all ranks together.
        loss: of the step.
        seconds: its duration; the first step is slower than later ones.
        layers: of the global model.
        ranks: one entry for each rank.
    """

    mode: str
    samples: int
    loss: float
    seconds: float
    layers: list[LayerRow]
    ranks: list[RankUse]


def dry_run(experiment: Experiment, comm: Communicator, data: str | None = None) -> DryRun:
    """Runs the first training step, without pretraining, and returns what it needs. Every rank must call it.

    Args:
        experiment: the experiment.
        comm: the ranks.
        data: directory of the data set.

    Raises:
        ExperimentError: on every rank, if the experiment or its data are not usable.
    """
    session = checked_session(experiment, comm, data)
    train, placed = session.splits["train"], session.placed
    session.begin_epoch(0)
    rows = session.batches.rows(session.batches.order(0), 0)
    inputs = tuple(session.batch(train, rows)[0].shape)
    parameters = list(placed.model.parameters())
    began, saved = monotonic(), SavedTensors(parameters)
    with saved_tensors_hooks(saved.pack, lambda x: x):
        loss, _ = placed.reduce_loss(float(session.train_on(rows, 0)), False)
    seconds = monotonic() - began
    use = RankUse(
        inputs,
        _bytes([*parameters, *placed.model.buffers()]),
        _bytes(p.grad for p in parameters if p.grad is not None),
        _bytes(x for state in session.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)),
        saved.bytes,
        _peak_memory(),
    )
    layers = layer_table(build_model(experiment, train), placed, train.shape).rows
    return DryRun(placed.description, len(rows), loss, seconds, layers, comm.allgather_obj(use))


@dataclass
class SavedTensors:
    """Counts the storage of tensors that autograd saves, each once."""

    parameters: Iterable[nn.Parameter]
    sizes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in self.parameters}

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    def pack(self, x: Tensor) -> Tensor:
        """Hook of autograd: counts the tensor, and returns it unchanged."""
        if x.device.type != "meta":  # the trace of a parallel model
            storage = x.untyped_storage()
            if storage.data_ptr() not in self._known:
                self.sizes[storage.data_ptr()] = storage.nbytes()
        return x


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kilobytes
