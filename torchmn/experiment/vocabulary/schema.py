"""The whole of an experiment file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from torchmn.errors import ExperimentError
from torchmn.experiment.file import registry
from torchmn.experiment.file.fields import (
    CostField,
    Count,
    DatasetField,
    LayersField,
    MetricsField,
    Nested,
    OptimizerField,
    named_schema,
    problem,
)
from torchmn.experiment.file.registry import Options
from torchmn.experiment.vocabulary import activations, costs, initializers, layers, metrics, optimizers
from torchmn.experiment.vocabulary import datasets as dataset_options
from torchmn.experiment.vocabulary.autoencoder import Autoencoder
from torchmn.experiment.vocabulary.datasets import DatasetOptions
from torchmn.experiment.vocabulary.layers.own_module import OwnModule
from torchmn.experiment.vocabulary.metrics import Metric
from torchmn.experiment.vocabulary.optimizers import Optimizer
from torchmn.modes import NAMES

# Importing these registers the names that a file may use.
KINDS = (activations, costs, dataset_options, initializers, layers, metrics, optimizers)

# Costs and metrics that take scores in another way than probabilities.
NEED_TO_KNOW = ("cross_entropy", "binary_cross_entropy", "log_loss", "log_loss_sum")
COSTS_OF_PROBABILITIES = ("cross_entropy", "binary_cross_entropy")
# Layers after which probabilities are still probabilities.
KEEP_VALUES = ("flatten", "reshape", "slice", "dropout", "identity")
MODELS = ("layers", "module", "autoencoder")


class Section(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Grid(Section):
    """How many ranks stand along each axis."""

    data: Count | None = None
    depth: Count | None = None
    height: Count | None = None
    width: Count | None = None

    def sizes(self) -> dict[str, int]:
        return self.model_dump(exclude_none=True)


class Parallel(Section):
    """How ranks share the work; the flags of the command line win."""

    mode: Literal[NAMES] | None = Field(  # type: ignore[valid-type]
        None, description="what ranks divide: samples, vectors, images, or several of these"
    )
    grid: Annotated[Any, Nested(Grid), named_schema("Grid")] = None


class Model(Section):
    """What is trained: layers, or a module of one's own; and what makes it better."""

    layers: LayersField = Field(None, description="a list of layers")
    module: Annotated[Any, Nested(OwnModule), named_schema("OwnModule")] = Field(
        None, description="a module of your own, as my_package.MyNet; its code is run"
    )
    autoencoder: Annotated[Any, Nested(Autoencoder), named_schema("Autoencoder")] = Field(
        None, description="the sparse autoencoder, as {maps: 8, kernels: [4, 3, 3]}"
    )
    cost: CostField = Field(description="what the training makes smaller, as cross_entropy")
    target: Literal["labels", "inputs"] = Field("labels", description="`inputs` for a model that reconstructs them")

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, given: Any) -> Any:
        named = [name for name in MODELS if isinstance(given, dict) and given.get(name) is not None]
        if len(named) != 1 and not set(given) - set(cls.model_fields):
            has = f"both {' and '.join(named)}" if named else "no layers"
            raise problem(f"has {has}: expected one of {', '.join(f'`{name}:`' for name in MODELS)}")
        return given

    @property
    def costs(self) -> list[Options]:
        return self.cost if isinstance(self.cost, list) else [self.cost]

    def activation_of(self, reader: Options) -> str:
        """Through which activation the units come that a cost or a metric looks at."""
        said = getattr(reader, "outputs", None)
        if said is not None:
            each_its_own = reader.kind == "binary_cross_entropy"
            return self._checked(reader, "identity" if said == "scores" else "logistic" if each_its_own else "softmax")
        stated = self._stated_by_costs(reader)
        if stated is not None:
            return self._checked(reader, stated)
        some = getattr(reader, "units", None) is not None
        found = _last_activation(self.layers, some) if self.layers else "identity"
        if found is None and reader.kind in NEED_TO_KNOW:
            what = "some units of a branch" if some else "a branch"
            raise ExperimentError(
                f"{reader.where}: {reader.kind} of {what}: say `outputs: scores`, or `outputs: probabilities` where "
                "they come through softmax or logistic"
            )
        return self._checked(reader, found or "identity")

    def _stated_by_costs(self, metric: Options) -> str | None:
        """The activation that a cost states of a module's outputs, for a metric of the same units; or None."""
        if self.layers or any(metric is cost for cost in self.costs):
            return None
        units = getattr(metric, "units", None)
        stating = [cost for cost in self.costs if getattr(cost, "outputs", None) is not None]
        alike = [cost for cost in stating if getattr(cost, "units", None) == units]
        return self.activation_of(alike[0]) if alike else None

    def _checked(self, reader: Options, activation: str) -> str:
        """The activation; an ExperimentError where a cost would take the logarithm of dropped probabilities."""
        drops = any(layer.kind == "dropout" for layer in _behind_activation(self.layers or []))
        if drops and activation in ("softmax", "logistic") and reader.kind in COSTS_OF_PROBABILITIES:
            raise ExperimentError(
                f"{reader.where}: {reader.kind} behind {activation} and dropout: dropout sets probabilities to 0, "
                "which have no logarithm. Put dropout before the last layer with weights"
            )
        return activation


def _behind_activation(layers: Sequence[Options]) -> Iterator[Options]:
    """The last layers, from the end, as long as they leave values as they are."""
    return takewhile(lambda layer: layer.kind in KEEP_VALUES, reversed(list(_one_by_one(layers))))


def _last_activation(layers: Sequence[Options], of_some_units: bool = False) -> str | None:
    """Through which activation outputs come; None where they come out of a branch, each part through its own."""
    last = next((layer for layer in reversed(list(_one_by_one(layers))) if layer.kind not in KEEP_VALUES), None)
    if last is None:
        return "identity"
    if last.kind == "branch":
        parts = {_last_activation([part]) for part in last.layers}  # type: ignore[attr-defined]
        known = parts == {"logistic"} and last.join == "concat"  # type: ignore[attr-defined]
        if of_some_units or (parts & {"softmax", "logistic", None} and not known):
            return None
        return "logistic" if known else "identity"
    if last.kind in registry.activations.entries:
        return last.kind
    activation = getattr(last, "activation", None)
    return activation.kind if activation is not None else "identity"


def _one_by_one(layers: Sequence[Options]) -> Iterator[Options]:
    """The layers in their order, with those of lists in the place of the lists."""
    for layer in layers:
        yield from _one_by_one(layer.layers) if layer.kind == "list" else [layer]  # type: ignore[attr-defined]


class Experiment(Section):
    """An experiment: what is learnt from what, and how."""

    imports: list[str] = Field(
        default_factory=list, description="Python modules that register names of your own; their code is run"
    )
    dataset: DatasetField = Field(description="as mnist, or {name: mnist, sample: 10%}")
    model: Annotated[Any, Nested(Model), named_schema("Model")] = Field(description="layers and cost")
    optimizer: OptimizerField = Field(description="as {name: sgd, lr: 0.01}")
    epochs: Count = Field(description="how often the training goes over the data")
    batch_size: Count = Field(description="how many samples there are in a step, on all ranks together")
    seed: int = Field(0, ge=0, le=2**62, description="where random numbers begin")
    metrics: MetricsField = Field(
        default_factory=list, description="what is measured after each epoch: a list, or one for each split"
    )
    parallel: Annotated[Any, Nested(Parallel), named_schema("Parallel")] = None
    shuffle: bool = Field(True, description="take the samples in another order in each epoch")
    drop_last: bool = Field(False, description="leave out a last batch that is not full")
    dtype: Literal["float32", "float64"] = "float32"
    predictions: list[Literal["train", "validation", "test"]] = Field(
        default_factory=list, description="the splits whose outputs are written at the end"
    )
    keep: Count = Field(3, description="how many checkpoints stay")

    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    # What the sections are, for readers and for type checkers: the fields are resolved by `reading`.
    def the_model(self) -> Model:
        return self.model

    def the_dataset(self) -> DatasetOptions:
        return self.dataset

    def the_optimizer(self) -> Optimizer:
        return self.optimizer

    def the_metrics(self) -> dict[str, list[Metric]]:
        """The metrics of each split that the file names; under "" those that are not of a certain one."""
        metrics: Any = self.metrics
        if isinstance(metrics, dict) and metrics:
            return metrics
        return {"": list(metrics or [])}

    def readers(self) -> list[tuple[Options, str]]:
        """All costs and metrics, each with the activation of the units that it reads."""
        model = self.the_model()
        some = (*model.costs, *(metric for metrics in self.the_metrics().values() for metric in metrics))
        return [(reader, model.activation_of(reader)) for reader in some]

    def the_parallel(self) -> Parallel:
        return self.parallel or Parallel(mode=None)
