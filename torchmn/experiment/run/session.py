"""Session: data, model, optimizer, cost and metrics of an experiment on this rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import number_of
from torchmn.data.batches import BatchSchedule, rank_slice
from torchmn.datasets import Arrays
from torchmn.datasets.formats.files import expanded
from torchmn.errors import ArgumentError, ExperimentError
from torchmn.experiment.run.agreement import dataset_fingerprint, on_every_rank
from torchmn.experiment.run.model import build_model, load_data
from torchmn.experiment.run.objective import Objective, Term
from torchmn.experiment.run.parallel import PlacedModel, place
from torchmn.experiment.vocabulary.datasets import Splits
from torchmn.experiment.vocabulary.layers.build import errors_at
from torchmn.experiment.vocabulary.layers.options import format_shape
from torchmn.experiment.vocabulary.metrics import Measure, build_measure, by_label
from torchmn.experiment.vocabulary.optimizers import OptimizerRules, layer_optimizer_options, parameter_groups
from torchmn.experiment.vocabulary.schema import Experiment
from torchmn.experiment.vocabulary.scores import Outputs, ProbabilitySource, with_scores
from torchmn.training import load_weights


def begin_step(comm: Communicator, seed: int, step: int) -> None:
    """Seeds torch's generators for a step, the same at any number of ranks.

    A parallel model draws the random numbers of the whole batch on every rank, and uses its part. Ranks that are
    threads share one generator, from which only rank 0 draws: so only rank 0 seeds it.
    """
    if comm.rank == 0 or not comm.traits.shares_process:
        number = seed_of(seed, step)
        # Not torch.manual_seed: for a GPU that is not in use it formats several stack traces, which takes longer than
        # the rest of a small step.
        torch.random.default_generator.manual_seed(number)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number)


def seed_of(seed: int, purpose: object) -> int:
    """Returns the seed for the random numbers of one purpose, in an experiment with this seed."""
    return number_of(f"{seed}/{purpose}")


@dataclass
class Session:
    """An experiment on this rank: data, parallel model, optimizer, cost and metrics."""

    experiment: Experiment
    comm: Communicator
    splits: Splits
    placed: PlacedModel
    optimizer: torch.optim.Optimizer
    rules: OptimizerRules
    objective: Objective
    split_measures: dict[str, dict[str, Measure]]
    """The metrics computed after each epoch: for each split, measures by name."""
    batches: BatchSchedule
    after_steps: dict[str, str]
    """Module name: name of its method that is called after each step, to bring weights back into bounds."""
    frozen: list[nn.Parameter] = field(default_factory=list)
    """The parameters that are not updated in this epoch."""

    @property
    def measures(self) -> dict[str, Measure]:
        """The measures of all splits, by name."""
        return {name: measure for by_name in self.split_measures.values() for name, measure in by_name.items()}

    @property
    def report_split(self) -> str:
        """The split whose predictions the report shows."""
        return next(split for split in ("test", "validation", "train") if split in self.splits)

    def begin_epoch(self, epoch: int) -> None:
        """Sets learning rates and frozen parameters of an epoch, counted from 0."""
        self.rules.set_epoch(epoch, self.experiment.epochs)
        spec, model = self.experiment.model.autoencoder, self.placed.model
        only_classifier = spec is not None and epoch < spec.classifier_epochs
        self.frozen = (
            [p for n, p in model.named_parameters() if not n.startswith("classifier.")] if only_classifier else []
        )

    def batch(self, data: Arrays, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets of this rank's part of a batch.

        Args:
            data: the split.
            rows: indices of the samples of the whole batch.
        """
        rows = self._local_rows(rows)
        dtype, device = self.experiment.torch_dtype(), self.comm.device
        inputs, targets = data.take(rows, dtype, self.placed.region)
        if self.experiment.model.target == "inputs":
            targets = data.take(rows, dtype)[0]  # whole images, as the outputs are
        return inputs.to(device), targets.to(device)

    def losses(self, outputs: Outputs, targets: Tensor, data: Arrays, rows: np.ndarray) -> Tensor:
        """Returns the loss of each of this rank's samples of a batch.

        Args:
            outputs: of the model, for this rank's samples.
            targets: as returned by `batch`.
            data: the split.
            rows: indices of the samples of the whole batch.
        """
        main = self.experiment.model.target
        other = "inputs" if main == "labels" else "labels"
        all_targets = {main: targets}
        if self.objective.needs(other):
            taken = data.take(self._local_rows(rows), self.experiment.torch_dtype())
            all_targets[other] = taken[0 if other == "inputs" else 1].to(self.comm.device)
        return self.objective.losses(outputs, all_targets)

    def _local_rows(self, rows: np.ndarray) -> np.ndarray:
        """Returns the rows of this rank's samples among those of a batch."""
        replicas = self.placed.replicas
        return rows[rank_slice(len(rows), replicas.size, replicas.rank)]

    def train_on(self, rows: np.ndarray, number: int) -> Tensor:
        """Runs training step `number` on the samples at `rows`.

        Returns:
            This rank's part of their mean loss, a 0-d float64 tensor.
        """
        data = self.splits["train"]
        inputs, targets = self.batch(data, rows)
        self.optimizer.zero_grad(set_to_none=True)
        begin_step(self.comm, self.experiment.seed, number)
        loss = self.losses(self.placed.forward(inputs), targets, data, rows).sum() / len(rows)
        self.placed.backward(loss)
        for parameter in self.frozen:
            parameter.grad = None  # optimizers skip parameters without a gradient
        self.optimizer.step()
        for module, method in self.after_steps.items():
            getattr(self.placed.model.get_submodule(module), method)()
        return loss.detach().double()


def open_session(
    experiment: Experiment, comm: Communicator, data_folder: str | None = None, *, loads_weights: bool = True
) -> Session:
    """Loads the data, builds the model and parallelizes it. Every rank must call it, with the same experiment.

    Args:
        experiment: the experiment.
        comm: the ranks.
        data_folder: directory of the data set.
        loads_weights: whether to load the file `model: {weights: ...}`; not if a checkpoint follows.

    Raises:
        ExperimentError: on every rank, if data or model are not usable or differ between ranks.
    """
    splits = on_every_rank(
        comm, experiment.dataset.kind, lambda: load_data(experiment, data_folder), dataset_fingerprint
    )
    train = splits["train"]

    def build() -> tuple[nn.Module, dict[int, ProbabilitySource]]:
        return with_scores(build_model(experiment, train), train.shape, experiment.costs_and_metrics())

    model, sources = on_every_rank(comm, "model", build, lambda built: _shapes_of(built[0]))
    model = model.to(comm.device)
    layer_options, after_steps = layer_optimizer_options(model), after_steps_of(model)
    placed = place(model, comm, experiment, train.shape)
    if loads_weights:
        load_initial_weights(placed.model, experiment, comm)
    rules = OptimizerRules(experiment.optimizer, parameter_groups(placed.model, layer_options))
    spec, terms = experiment.model, []
    for cost in spec.costs:
        with errors_at(cost.where, cost.kind):
            terms.append(Term.of(cost, spec.activation_of(cost), spec.target, sources.get(id(cost))))
    return Session(
        experiment,
        comm,
        splits,
        placed,
        placed.optimizer(rules.optimizer),
        rules,
        Objective(terms, placed.replicas),
        measures_of(experiment, splits, sources),
        BatchSchedule(len(train), experiment.batch_size, experiment.seed, experiment.shuffle, experiment.drop_last),
        after_steps,
    )


def load_initial_weights(model: nn.Module, experiment: Experiment, comm: Communicator) -> None:
    """Loads the file `model: {weights: ...}` of an experiment that has it. Every rank must call it."""
    if experiment.model.weights is None:
        return
    try:
        load_weights(model, expanded(experiment.model.weights), comm)
    except ArgumentError as error:
        raise ExperimentError(f"model: weights: {error}") from error


def measures_of(
    experiment: Experiment, splits: Splits, sources: Mapping[int, ProbabilitySource]
) -> dict[str, dict[str, Measure]]:
    """Returns the measures of each split that is evaluated after an epoch; `sources` are those of `with_scores`."""
    found = {}
    for split, metrics in experiment.metrics_by_split().items():
        split = split or next(name for name in ("test", "train") if name in splits)
        if split not in splits:
            advice = " Set `validation: 10%` in dataset to hold out some of them." if split == "validation" else ""
            raise ExperimentError(
                f"{experiment.dataset.where}: metrics need {split} samples, and there are only "
                f"{', '.join(splits)}.{advice}"
            )
        activation = experiment.model.activation_of
        found[split] = {}
        for name, metric in by_label(metrics).items():
            with errors_at(metric.where, metric.kind):
                found[split][name] = build_measure(metric, activation(metric), sources.get(id(metric)))
    return found


def _shapes_of(model: nn.Module) -> dict[str, str]:
    """Returns the shapes of parameters and buffers by name, to compare models between ranks."""
    return {name: format_shape(tuple(x.shape)) for name, x in (*model.named_parameters(), *model.named_buffers())}


def after_steps_of(model: nn.Module) -> dict[str, str]:
    """Returns for each module with an attribute `after_step` the name of the method to call after each step."""
    return {name: str(module.after_step) for name, module in model.named_modules() if hasattr(module, "after_step")}
