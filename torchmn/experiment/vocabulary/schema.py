"""The schema of an experiment file: its sections, and the activation that each cost and metric applies to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field, model_validator

from torchmn.errors import ExperimentError
from torchmn.experiment.file import registry
from torchmn.experiment.file.fields import (
    LAYERS_SCHEMA,
    CostField,
    Count,
    LayerList,
    MetricsField,
    Nested,
    Reference,
    Resolved,
    invalid,
    named_schema,
)
from torchmn.experiment.file.registry import Layer, Options, Section
from torchmn.experiment.vocabulary import activations, costs, initializers, layers, metrics, optimizers
from torchmn.experiment.vocabulary import datasets as dataset_options
from torchmn.experiment.vocabulary.autoencoder import Autoencoder
from torchmn.experiment.vocabulary.datasets import DatasetOptions
from torchmn.experiment.vocabulary.layers.composite import BranchLayer, ListLayer
from torchmn.experiment.vocabulary.layers.user_module import UserModule
from torchmn.experiment.vocabulary.optimizers import Optimizer
from torchmn.modes import NAMES

# Importing these registers the names that a file may use.
KINDS = (activations, costs, dataset_options, initializers, layers, metrics, optimizers)

# Costs and metrics whose formula differs for scores and probabilities.
DEPEND_ON_ACTIVATION = ("cross_entropy", "binary_cross_entropy", "log_loss", "log_loss_sum", "torchmetrics")
COSTS_OF_PROBABILITIES = ("cross_entropy", "binary_cross_entropy")
# Layers that may follow an activation, and whose outputs are still probabilities.
KEEP_VALUES = ("flatten", "reshape", "slice", "dropout", "identity")
MODELS = ("layers", "module", "autoencoder")

if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[NAMES]


class Grid(Section):
    """The number of ranks along each axis of the process grid."""

    data: Count | None = None
    depth: Count | None = None
    height: Count | None = None
    width: Count | None = None

    def sizes(self) -> dict[str, int]:
        """Returns the sizes of the axes that are set."""
        return self.model_dump(exclude_none=True)


class Parallel(Section):
    """The parallel mode and the process grid; command line flags replace them."""

    mode: ModeName | None = Field(None, description="what ranks divide: samples, vectors, images, or two of these")
    grid: Resolved[Grid | None, Nested(Grid), named_schema("Grid")] = None


class ModelSection(Section):
    """The section `model:` of a file: layers, a module or the autoencoder; costs; and the target."""

    layers: Resolved[list[Layer] | None, LayerList(), LAYERS_SCHEMA] = Field(None, description="a list of layers")
    module: Resolved[UserModule | None, Nested(UserModule), named_schema("UserModule")] = Field(
        None, description="the full name of a module class, such as my_package.MyNet; its code is run"
    )
    autoencoder: Resolved[Autoencoder | None, Nested(Autoencoder), named_schema("Autoencoder")] = Field(
        None, description="the sparse autoencoder, such as {maps: 8, kernels: [4, 3, 3]}"
    )
    cost: CostField = Field(description="what training minimises, such as cross_entropy")
    weights: str | None = Field(
        None, description="a file of weights to begin with: safetensors, or torch.save(model.state_dict(), path)"
    )
    target: Literal["labels", "inputs"] = Field("labels", description="`inputs` for a model that reconstructs them")

    @model_validator(mode="before")
    @classmethod
    def _check_one_model(cls, values: dict[str, object]) -> dict[str, object]:
        named = [name for name in MODELS if values.get(name) is not None]
        if len(named) != 1 and not set(values) - set(cls.model_fields):
            has = f"both {' and '.join(named)}" if named else "no layers"
            raise invalid(f"has {has}: expected one of {', '.join(f'`{name}:`' for name in MODELS)}")
        return values

    @property
    def costs(self) -> list[Options]:
        """The costs, as a list also if there is one."""
        return self.cost if isinstance(self.cost, list) else [self.cost]

    def activation_of(self, reader: Options) -> str:
        """Returns the name of the activation whose outputs a cost or metric reads; "identity" if there is none.

        Args:
            reader: the cost or metric.

        Returns:
            A name of the vocabulary.

        Raises:
            ExperimentError: if the cost or metric needs the activation and it cannot be derived from the layers, or if
                a cost of probabilities follows dropout.
        """
        outputs = getattr(reader, "outputs", None)
        if outputs is not None:
            probabilities = "logistic" if reader.kind == "binary_cross_entropy" else "softmax"
            return self._check_dropout(reader, "identity" if outputs == "scores" else probabilities)
        stated = self._stated_by_costs(reader)
        if stated is not None:
            return self._check_dropout(reader, stated)
        has_units = getattr(reader, "units", None) is not None
        found = _last_activation(self.layers, has_units) if self.layers else "identity"
        if found is None and reader.kind in DEPEND_ON_ACTIVATION:
            what = "some units of a branch" if has_units else "a branch"
            raise ExperimentError(
                f"{reader.where}: {reader.kind} of {what}: set `outputs: scores`, or `outputs: probabilities` if they "
                "are outputs of softmax or logistic"
            )
        return self._check_dropout(reader, found or "identity")

    def _stated_by_costs(self, metric: Options) -> str | None:
        """Returns the activation that the `outputs` of a cost states for the units of a metric; None without one.

        Only for models that are not lists of layers, whose activations are unknown.
        """
        if self.layers or any(metric is cost for cost in self.costs):
            return None
        units = getattr(metric, "units", None)
        stating = [cost for cost in self.costs if getattr(cost, "outputs", None) is not None]
        matching = [cost for cost in stating if getattr(cost, "units", None) == units]
        return self.activation_of(matching[0]) if matching else None

    def _check_dropout(self, reader: Options, activation: str) -> str:
        """Returns the activation; raises if a cost would compute the logarithm of dropped probabilities."""
        drops = any(layer.kind == "dropout" for layer in _after_activation(self.layers or []))
        if drops and activation in ("softmax", "logistic") and reader.kind in COSTS_OF_PROBABILITIES:
            raise ExperimentError(
                f"{reader.where}: {reader.kind} after {activation} and dropout: dropout sets probabilities to 0, "
                "which have no logarithm. Put dropout before the last layer with weights"
            )
        return activation


def _after_activation(layers: Sequence[Options]) -> Iterator[Options]:
    """Returns the layers after the last one that changes values, in reverse order."""
    return takewhile(lambda layer: layer.kind in KEEP_VALUES, reversed(list(_flatten_lists(layers))))


def _last_activation(layers: Sequence[Options], of_some_units: bool = False) -> str | None:
    """Returns the activation of the outputs; None if a branch concatenates outputs of different activations."""
    last = next((layer for layer in reversed(list(_flatten_lists(layers))) if layer.kind not in KEEP_VALUES), None)
    if last is None:
        return "identity"
    if isinstance(last, BranchLayer):
        parts = {_last_activation([part]) for part in last.layers}
        known = parts == {"logistic"} and last.join == "concat"
        if of_some_units or (parts & {"softmax", "logistic", None} and not known):
            return None
        return "logistic" if known else "identity"
    if last.kind in registry.activations.entries:
        return last.kind
    activation = getattr(last, "activation", None)
    return activation.kind if activation is not None else "identity"


def _flatten_lists(layers: Sequence[Options]) -> Iterator[Options]:
    """Yields the layers in order, with each `list` replaced by the layers in it."""
    for layer in layers:
        yield from _flatten_lists(layer.layers) if isinstance(layer, ListLayer) else [layer]


class Experiment(Section):
    """A validated experiment: data set, model, optimizer and all settings of a file; `load` returns it."""

    imports: list[str] = Field(
        default_factory=list, description="Python modules that register your own names; their code is run"
    )
    dataset: Resolved[DatasetOptions, Reference(registry.datasets), named_schema("dataset")] = Field(
        description="a name or a mapping, such as mnist or {name: mnist, sample: 10%}"
    )
    model: Resolved[ModelSection, Nested(ModelSection), named_schema("ModelSection")] = Field(
        description="layers and cost"
    )
    optimizer: Resolved[Optimizer, Reference(registry.optimizers), named_schema("optimizer")] = Field(
        description="such as {name: sgd, lr: 0.01}"
    )
    epochs: Count = Field(description="number of passes over the training samples")
    batch_size: Count = Field(description="number of samples in a step, on all ranks together")
    seed: int = Field(0, ge=0, le=2**62, description="seed of all random numbers")
    metrics: MetricsField = Field(
        default_factory=list, description="metrics after each epoch: a list, or a mapping of splits to lists"
    )
    parallel: Resolved[Parallel | None, Nested(Parallel), named_schema("Parallel")] = None
    shuffle: bool = Field(True, description="whether each epoch has a new order of samples")
    drop_last: bool = Field(False, description="whether an incomplete last batch is dropped")
    dtype: Literal["float32", "float64"] = "float32"
    predictions: list[Literal["train", "validation", "test"]] = Field(
        default_factory=list, description="the splits whose outputs are written at the end"
    )
    keep: Count = Field(3, description="number of checkpoints to keep")

    def torch_dtype(self) -> torch.dtype:
        """Returns the dtype of the model's parameters."""
        return torch.float64 if self.dtype == "float64" else torch.float32

    def metrics_by_split(self) -> dict[str, list[Options]]:
        """Returns the metrics of each split; the key of a list without splits is ""."""
        if not self.metrics:  # also `metrics:` without a value
            return {"": []}
        return self.metrics if isinstance(self.metrics, dict) else {"": self.metrics}

    def costs_and_metrics(self) -> list[tuple[Options, str]]:
        """Returns all costs and metrics, each with the activation whose outputs it reads."""
        metrics = (metric for metrics in self.metrics_by_split().values() for metric in metrics)
        return [(reader, self.model.activation_of(reader)) for reader in (*self.model.costs, *metrics)]

    def parallel_section(self) -> Parallel:
        """Returns the section `parallel:`, empty if the file has none."""
        return self.parallel or Parallel(mode=None)
