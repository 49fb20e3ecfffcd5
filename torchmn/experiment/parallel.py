"""How an experiment's model is put on ranks: the one place that knows the modes.

A mode decides which samples of a batch this rank takes and which region of each, and how gradients are joined. The
trainer knows nothing else of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchmn.communicators.base import Communicator
from torchmn.datasets.arrays import Region
from torchmn.errors import ExperimentError
from torchmn.experiment.schema import Experiment, Parallel
from torchmn.nn import create_mnbn_model
from torchmn.optim import create_multi_node_optimizer


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
    region: Region | None = None

    @property
    def is_cut(self) -> bool:
        """Whether this rank holds only a part of some weights."""
        return self.replicas.size != self.comm.size

    @property
    def description(self) -> str:
        return "1" if self.comm.size == 1 else f"{self.comm.size}, {self.mode}"

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """`optimizer`, stepping with the gradients of all ranks."""
        if self.comm.size == 1:
            return optimizer
        return create_multi_node_optimizer(optimizer, self.comm, model=self.model)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the mean loss of the whole batch, of which `loss` is this rank's part."""
        # The optimizer takes the mean over ranks of gradients that should be summed.
        (loss * self.comm.size).backward()

    def joined(self, loss: float, stop: bool) -> tuple[float, bool]:
        """The loss of the whole batch, from each rank's part of it, and whether any rank wants to stop."""
        told = torch.tensor([loss / (self.comm.size // self.replicas.size), float(stop)], dtype=torch.float64)
        total, stops = self.comm.allreduce(told).tolist()
        return total, stops > 0


def check(model: nn.Module, shape: tuple[int, ...], experiment: Experiment, size: int) -> None:
    """Raise an ExperimentError where the experiment's mode can not work on `size` ranks."""
    mode = experiment.the_parallel().mode or "datapar"
    if mode != "datapar" and size > 1:
        raise ExperimentError(f"mode {mode} is not there yet; --datapar is")


def place(model: nn.Module, comm: Communicator, parallel: Parallel, where: str) -> Placed:
    """`model` on the ranks of `comm` as `parallel` says; an ExperimentError where that can not be."""
    mode = parallel.mode or "datapar"
    if comm.size == 1:
        return Placed(model, comm, comm, "one rank")
    if mode == "datapar":
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            model = create_mnbn_model(model, comm)
        return Placed(model, comm, comm, mode)
    raise ExperimentError(f"{where}: mode {mode} is not there yet; --datapar is")
