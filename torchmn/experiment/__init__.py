"""Experiments described by one YAML file, for any number of ranks and any parallel mode.

`load` reads and checks a file; the `register_*` decorators add names that a file may use.
"""

from torchmn.errors import ExperimentError
from torchmn.experiment.file.overrides import Override, parse_set
from torchmn.experiment.file.registry import (
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
from torchmn.experiment.vocabulary.load import dump, load
from torchmn.experiment.vocabulary.metrics import Measure
from torchmn.experiment.vocabulary.schema import Experiment

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
