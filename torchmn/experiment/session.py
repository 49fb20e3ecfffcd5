"""Everything that a training needs, built from an experiment on each rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from torchmn.communicators.base import Communicator
from torchmn.datasets import Arrays
from torchmn.experiment.batches import Batches, share
from torchmn.experiment.costs import Losses
from torchmn.experiment.datasets import Splits
from torchmn.experiment.metrics import Measure
from torchmn.experiment.model import build_model, load_data
from torchmn.experiment.optimizers import own_rules, parameter_groups
from torchmn.experiment.parallel import Placed, place
from torchmn.experiment.randomness import begin_step
from torchmn.experiment.schema import Experiment


@dataclass
class Session:
    """An experiment on this rank: data, model in its place, optimizer, cost and metrics."""

    experiment: Experiment
    comm: Communicator
    splits: Splits
    placed: Placed
    optimizer: torch.optim.Optimizer
    losses: Losses
    measures: dict[str, Measure]
    batches: Batches
    after_steps: dict[str, str]
    """Which method of which module brings its weights back into bounds after a step."""
    frozen: list[nn.Parameter] = field(default_factory=list)
    """What does not learn in this epoch."""

    def begin_epoch(self, epoch: int) -> None:
        """Set what depends on the epoch, the first being 0: learning rates, and which weights learn."""
        self.experiment.the_optimizer().set_epoch(self.optimizer, epoch, self.experiment.epochs)
        spec, model = self.experiment.the_model().autoencoder, self.placed.model
        alone = spec is not None and epoch < spec.classifier_epochs
        self.frozen = [p for n, p in model.named_parameters() if not n.startswith("classifier.")] if alone else []

    def batch(self, data: Arrays, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """This rank's part of the samples at `rows`, and their targets."""
        replicas = self.placed.replicas
        mine = share(len(rows), replicas.size, replicas.rank)
        dtype, device = self.experiment.torch_dtype(), self.comm.device
        inputs, targets = data.take(rows[mine], dtype, self.placed.region)
        if self.experiment.the_model().target == "inputs":
            targets = data.take(rows[mine], dtype)[0]  # whole, as outputs are
        return inputs.to(device), targets.to(device)

    def train_on(self, rows: np.ndarray, number: int) -> Tensor:
        """Step `number`, on the samples at `rows`; returns this rank's part of their mean loss, in float64."""
        inputs, targets = self.batch(self.splits["train"], rows)
        self.optimizer.zero_grad(set_to_none=True)
        begin_step(self.comm, self.experiment.seed, number)
        loss = self.losses(self.placed.forward(inputs), targets).sum() / len(rows)
        self.placed.backward(loss)
        for parameter in self.frozen:
            parameter.grad = None  # which an optimizer leaves as it is
        self.optimizer.step()
        for module, method in self.after_steps.items():
            getattr(self.placed.model.get_submodule(module), method)()
        return loss.detach().double()


def open_session(experiment: Experiment, comm: Communicator, data_folder: str | None = None) -> Session:
    """The experiment on this rank; every rank must call it, with the same experiment."""
    splits = load_data(experiment, data_folder)
    train = splits["train"]
    model = build_model(experiment, train).to(comm.device)
    rules, after_steps = own_rules(model), after_steps_of(model)
    placed = place(model, comm, experiment, train.shape)
    optimizer = experiment.the_optimizer().build(parameter_groups(placed.model, rules))
    activation = experiment.the_model().last_activation
    return Session(
        experiment,
        comm,
        splits,
        placed,
        placed.optimizer(optimizer),
        experiment.the_model().cost.build(activation),
        {metric.label: metric.build(activation) for metric in experiment.the_metrics()},
        Batches(len(train), experiment.batch_size, experiment.seed, experiment.shuffle, experiment.drop_last),
        after_steps,
    )


def after_steps_of(model: nn.Module) -> dict[str, str]:
    """The methods that layers ask for after each step, by the names of their modules."""
    return {name: module.after_step for name, module in model.named_modules() if hasattr(module, "after_step")}  # type: ignore[misc]
