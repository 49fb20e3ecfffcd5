"""Everything that a training needs, built from an experiment on each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import number_of
from torchmn.data.batches import Batches, share
from torchmn.datasets import Arrays
from torchmn.errors import ExperimentError
from torchmn.experiment.run.agreement import look_of, on_every_rank
from torchmn.experiment.run.model import build_model, load_data
from torchmn.experiment.run.objective import Objective, Term
from torchmn.experiment.run.parallel import Placed, place
from torchmn.experiment.vocabulary.datasets import Splits
from torchmn.experiment.vocabulary.layers.build import naming
from torchmn.experiment.vocabulary.layers.options import text
from torchmn.experiment.vocabulary.metrics import Measure, labelled, measure_of
from torchmn.experiment.vocabulary.optimizers import own_rules, parameter_groups
from torchmn.experiment.vocabulary.schema import Experiment
from torchmn.experiment.vocabulary.scores import Outputs, Source, with_scores


def begin_step(comm: Communicator, seed: int, step: int) -> None:
    """Let torch's generator begin where it begins in this step on every number of ranks.

    A parallel model draws the numbers of the whole batch on every rank, and takes its part. Ranks that are threads
    share one generator: there rank 0 alone draws, and so rank 0 alone sets it.
    """
    if comm.rank == 0 or not comm.traits.shares_process:
        torch.manual_seed(seed_of(seed, step))


def seed_of(seed: int, what: object) -> int:
    """Where the random numbers of `what` begin, in an experiment with this seed."""
    return number_of(f"{seed}/{what}")


@dataclass
class Session:
    """An experiment on this rank: data, model in its place, optimizer, cost and metrics."""

    experiment: Experiment
    comm: Communicator
    splits: Splits
    placed: Placed
    optimizer: torch.optim.Optimizer
    objective: Objective
    measured: dict[str, dict[str, Measure]]
    """What is measured after each epoch: for each split, measures by their names."""
    batches: Batches
    after_steps: dict[str, str]
    """Which method of which module brings its weights back into bounds after a step."""
    frozen: list[nn.Parameter] = field(default_factory=list)
    """What does not learn in this epoch."""

    @property
    def measures(self) -> dict[str, Measure]:
        """All measures, by their names."""
        return {name: measure for some in self.measured.values() for name, measure in some.items()}

    @property
    def shown_split(self) -> str:
        """The split whose outputs are looked at in the end."""
        return next(split for split in ("test", "validation", "train") if split in self.splits)

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

    def losses(self, outputs: Outputs, targets: Tensor, data: Arrays, rows: np.ndarray) -> Tensor:
        """The loss of each of this rank's samples at `rows`; `targets` are those that `batch` gave."""
        own = self.experiment.the_model().target
        other = "inputs" if own == "labels" else "labels"
        wanted = {own: targets}
        if self.objective.needs(other):
            replicas = self.placed.replicas
            mine = rows[share(len(rows), replicas.size, replicas.rank)]
            taken = data.take(mine, self.experiment.torch_dtype())
            wanted[other] = taken[0 if other == "inputs" else 1].to(self.comm.device)
        return self.objective.losses(outputs, wanted)

    def train_on(self, rows: np.ndarray, number: int) -> Tensor:
        """Step `number`, on the samples at `rows`; returns this rank's part of their mean loss, in float64."""
        data = self.splits["train"]
        inputs, targets = self.batch(data, rows)
        self.optimizer.zero_grad(set_to_none=True)
        begin_step(self.comm, self.experiment.seed, number)
        loss = self.losses(self.placed.forward(inputs), targets, data, rows).sum() / len(rows)
        self.placed.backward(loss)
        for parameter in self.frozen:
            parameter.grad = None  # which an optimizer leaves as it is
        self.optimizer.step()
        for module, method in self.after_steps.items():
            getattr(self.placed.model.get_submodule(module), method)()
        return loss.detach().double()


def open_session(experiment: Experiment, comm: Communicator, data_folder: str | None = None) -> Session:
    """The experiment on this rank; every rank must call it, with the same experiment."""
    splits = on_every_rank(comm, experiment.the_dataset().kind, lambda: load_data(experiment, data_folder), look_of)
    train = splits["train"]

    def build() -> tuple[nn.Module, dict[int, Source]]:
        return with_scores(build_model(experiment, train), train.shape, experiment.readers())

    model, sources = on_every_rank(comm, "model", build, lambda built: _shapes_of(built[0]))
    model = model.to(comm.device)
    rules, after_steps = own_rules(model), after_steps_of(model)
    placed = place(model, comm, experiment, train.shape)
    optimizer, spec, terms = experiment.the_optimizer(), experiment.the_model(), []
    with naming(optimizer.where, optimizer.kind):
        built = optimizer.build(parameter_groups(placed.model, rules))
    for cost in spec.costs:
        with naming(cost.where, cost.kind):
            terms.append(Term.of(cost, spec.activation_of(cost), spec.target, sources.get(id(cost))))
    return Session(
        experiment,
        comm,
        splits,
        placed,
        placed.optimizer(built),
        Objective(terms, placed.replicas),
        measures_of(experiment, splits, sources),
        Batches(len(train), experiment.batch_size, experiment.seed, experiment.shuffle, experiment.drop_last),
        after_steps,
    )


def measures_of(experiment: Experiment, splits: Splits, sources: Mapping[int, Source]) -> dict[str, dict[str, Measure]]:
    """The measures of each split that is looked at after an epoch; `sources` of `with_scores`."""
    found = {}
    for split, metrics in experiment.the_metrics().items():
        split = split or next(name for name in ("test", "train") if name in splits)
        if split not in splits:
            way_out = " Say `validation: 10%` in dataset to hold some of them out." if split == "validation" else ""
            raise ExperimentError(
                f"{experiment.the_dataset().where}: metrics are asked for of {split} samples, and there are only "
                f"{', '.join(splits)}.{way_out}"
            )
        activation = experiment.the_model().activation_of
        found[split] = {}
        for name, metric in labelled(metrics).items():
            with naming(metric.where, metric.kind):
                found[split][name] = measure_of(metric, activation(metric), sources.get(id(metric)))
    return found


def _shapes_of(model: nn.Module) -> dict[str, str]:
    """What tells one model from another: the names of its weights, and their shapes."""
    return {name: text(tuple(x.shape)) for name, x in (*model.named_parameters(), *model.named_buffers())}


def after_steps_of(model: nn.Module) -> dict[str, str]:
    """The methods that layers ask for after each step, by the names of their modules."""
    return {name: module.after_step for name, module in model.named_modules() if hasattr(module, "after_step")}  # type: ignore[misc]
