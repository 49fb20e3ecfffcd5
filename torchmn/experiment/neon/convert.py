"""convert: turns the YAML tree of a neon experiment into a TorchMN experiment, with notes on ignored keys."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import Any

from yaml.nodes import Node

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.document import Document, children
from torchmn.experiment.file.tagged_value import OBJECT, TaggedValue, as_document, at, plain, read_nodes, same_object
from torchmn.experiment.neon.autoencoder import convert_autoencoder
from torchmn.experiment.neon.balance import convert_balance
from torchmn.experiment.neon.data import convert_dataset
from torchmn.experiment.neon.keys.check import check_keys
from torchmn.experiment.neon.keys.layer_tables import FLOAT32
from torchmn.experiment.neon.keys.tables import ANCHOR_KEYS, BACKENDS, EMULATORS, EXPERIMENTS, KEYS, MODELS
from torchmn.experiment.neon.layers import ConvertedLayers, convert_layers
from torchmn.experiment.neon.metrics import default_metrics, metrics_of, predictions_of
from torchmn.experiment.neon.modes import batch_size_of, mode_of
from torchmn.experiment.neon.optimizer import momentum_of_model, optimizer_of, rule_of_model, unused_rule
from torchmn.experiment.neon.terms.shapes import sample_shape
from torchmn.experiment.neon.terms.values import check_cost, cost_of, one_of

UNSUPPORTED_MODELS = {
    "RNN": "it keeps its state from batch to batch. Here a sample is a sequence: in TorchMN's format, `dataset: {name: "
    "text, length: 20}`, `- lstm: {units: 64}` (or rnn, gru) and `- linear: 96` predict the next character",
    "RBM": "it is trained without labels. In TorchMN's format, put `- rbm: {units: 500, pretraining: {epochs: 1, lr: "
    "0.1}}` before a last `- linear: 10`",
    "DBN": "it is trained without labels. In TorchMN's format, put several `- rbm: {units: 500, pretraining: {epochs: "
    "1, lr: 0.1}}` before a last `- linear: 10`",
}
"""Models of neon that are not converted, with the alternative."""


@dataclass(frozen=True)
class Converted:
    """A TorchMN experiment whose error messages refer to the original file, with a note for each ignored key."""

    document: Document
    notes: list[str]
    is_neon: bool = True


def is_neon(root: Node) -> bool:
    """Returns whether a file is a neon experiment: it contains objects tagged with !obj:."""
    waiting, seen = deque([root]), {id(root)}
    while waiting:
        node = waiting.popleft()
        if node.tag.startswith(OBJECT):
            return True
        new = {id(child): child for child in children(node) if id(child) not in seen}  # aliases only once
        waiting += new.values()
        seen.update(new)
    return False


def convert(name: str, root: Node) -> Converted:
    """Converts a neon experiment.

    Args:
        name: of the file, for messages.
        root: its YAML tree.

    Returns:
        The experiment, and the notes on keys that have no meaning any more.

    Raises:
        ExperimentError: with file and line, if something is not supported.
    """
    notes: list[str] = []
    experiment = read_nodes(name, root, notes)
    try:
        return _convert(name, experiment, notes)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value of a type that neon does not accept there.
        raise ExperimentError(f"{experiment.where}: this is not a valid neon experiment: {error}") from error


def _model_of(experiment: TaggedValue) -> TaggedValue:
    """Returns the model; raises an ExperimentError if the class of experiment or model is not supported."""
    if experiment.kind is not None and experiment.name not in EXPERIMENTS:
        raise ExperimentError(
            f"{experiment.where}: the experiment {experiment.kind} is not supported. "
            f"{nearest(experiment.name, EXPERIMENTS)}"
        )
    model = experiment.get("model")
    if model is None:
        raise ExperimentError(f"{experiment.where}: the experiment must have the key 'model'")
    if model.name in UNSUPPORTED_MODELS:
        raise ExperimentError(
            f"{model.where}: the model {model.kind} is not supported: {UNSUPPORTED_MODELS[model.name]}"
        )
    if model.name not in MODELS:
        raise ExperimentError(
            f"{model.where}: the model {model.kind or 'without !obj:'} is not supported. {nearest(model.name, MODELS)}"
        )
    return model


def _convert(name: str, experiment: TaggedValue, notes: list[str]) -> Converted:
    model = _model_of(experiment)
    layers = _required(model, "layers")
    notes += check_keys(experiment, KEYS, ANCHOR_KEYS)
    source, units = _dataset_of(experiment, model, layers), None
    dataset = convert_dataset(source, notes)
    mode = mode_of(experiment, source, model, notes)
    size = _required(model, "batch_size")
    shape = sample_shape(dataset)
    if model.name == "GB":
        autoencoder, cost, optimizer = convert_autoencoder(model, shape, notes)
        new_model: dict[str, Any] = {"autoencoder": autoencoder, "cost": cost}
    else:
        converted = ConvertedLayers(
            batch_size=size, default_rule=rule_of_model(model), momentum=momentum_of_model(model), shape=shape
        )
        if model.name == "Balance":
            costs, units = convert_balance(model, converted)
            new_model = {"layers": converted.layers, "cost": costs}
        else:
            convert_layers(layers, converted)
            reconstructs = model.name == "Autoencoder" and converted.cost is None
            target = "inputs" if reconstructs else converted.target
            new_model = {"layers": converted.layers, "cost": _cost(model, converted), "target": target}
        optimizer = optimizer_of(converted)
        notes += [*converted.notes, *unused_rule(model, converted)]
    _check_saved_model(model, notes)
    new_experiment: dict[str, Any] = {
        "dataset": dataset,
        "model": new_model,
        "optimizer": optimizer,
        "epochs": _required(model, "num_epochs"),
        "batch_size": batch_size_of(source, size, mode, notes),
        "seed": _seed(experiment, notes),
        "metrics": metrics_of(experiment, model, dataset, units, notes)
        or default_metrics(experiment, new_model, dataset, units, notes),
        "parallel": None if mode is None else at(mode.where, {"mode": mode}),
        "shuffle": False,
        "drop_last": True,
        "predictions": predictions_of(experiment, dataset, notes),
    }
    return Converted(as_document(name, at(experiment.where, new_experiment)), notes)


def _required(section: TaggedValue, key: str) -> TaggedValue:
    found = section.get(key)
    if found is None:
        raise ExperimentError(f"{section.where}: {section.kind or 'this'} needs the key {key!r}")
    return found


def _dataset_of(experiment: TaggedValue, model: TaggedValue, layers: TaggedValue) -> TaggedValue:
    """Returns the data set of the experiment, else that of the model or its DataLayer; others must be the same."""
    inner = [model, *(layers.value if isinstance(layers.value, list) else ())]
    of_model = [found for section in inner if (found := section.get("dataset")) is not None]
    dataset = _dataset_of_experiment(experiment, of_model[0] if of_model else None)
    for found in of_model:
        if not same_object(found, dataset):
            raise ExperimentError(
                f"{found.where}: expected dataset to be that of the experiment, {dataset.kind or 'without !obj:'}, got "
                f"{found.kind or str(plain(found))[:60]}: a model is trained on one data set"
            )
    return dataset


def _dataset_of_experiment(experiment: TaggedValue, of_model: TaggedValue | None) -> TaggedValue:
    found, several = experiment.get("dataset"), experiment.get("datasets")
    if found is not None and several is not None:
        raise ExperimentError(f"{several.where}: the experiment has both dataset and datasets: expected one of them")
    found = found or several or of_model
    if found is not None and isinstance(found.value, list) and len(found.value) == 1:
        found = found.value[0]
    if found is None:
        raise ExperimentError(f"{experiment.where}: the experiment must have the key 'dataset'")
    return found


def _cost(model: TaggedValue, converted: ConvertedLayers) -> TaggedValue:
    found = model.get("cost")
    if converted.cost is not None:
        if found is not None:
            converted.notes.append(f"{found.where}: cost has no effect: there is a CostLayer, and neon uses its cost")
        return converted.cost
    if found is None:
        raise ExperimentError(f"{model.where}: expected a CostLayer or the key 'cost', got neither")
    check_cost(found, converted.last)
    return cost_of(found, converted.batch_size)


def _check_saved_model(model: TaggedValue, notes: list[str]) -> None:
    """Raises an ExperimentError if the model continues from a file that exists."""
    for key in ("deserialized_path", "depickle"):
        if (found := model.get(key)) is None:
            continue
        if os.path.exists(os.path.expanduser(str(plain(found)))):
            raise ExperimentError(
                f"{found.where}: {key} {str(plain(found))!r}: neon's saved models are not read: remove the key to "
                "begin with the initial weights"
            )
        notes.append(
            f"{found.where}: {key} {str(plain(found))!r} does not exist: training begins with the initial weights"
        )


def _seed(experiment: TaggedValue, notes: list[str]) -> TaggedValue | None:
    backend = experiment.get("backend")
    if backend is None:
        return None
    one_of(BACKENDS, backend, "the back end")
    if backend.name in EMULATORS:
        notes.append(f"{backend.where}: the back end {backend.kind} has no effect: {FLOAT32.note}")
    return backend.get("rng_seed")
