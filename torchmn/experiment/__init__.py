"""Experiments: one YAML file, any number of ranks, any mode."""

from torchmn.errors import ExperimentError
from torchmn.experiment.load import dump, load
from torchmn.experiment.metrics import Measure
from torchmn.experiment.overrides import Override, parse_set
from torchmn.experiment.registry import (
    Layer,
    Options,
    register_activation,
    register_cost,
    register_dataset,
    register_initializer,
    register_layer,
    register_metric,
    register_optimizer,
)
from torchmn.experiment.schema import Experiment

__all__ = [
    "Experiment",
    "ExperimentError",
    "Layer",
    "Measure",
    "Options",
    "Override",
    "dump",
    "load",
    "parse_set",
    "register_activation",
    "register_cost",
    "register_dataset",
    "register_initializer",
    "register_layer",
    "register_metric",
    "register_optimizer",
]
