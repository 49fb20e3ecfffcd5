"""convert: turns the YAML tree of a neon experiment into a TorchMN experiment, with notes on ignored keys."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml.nodes import Node

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.document import Document, children
from torchmn.experiment.neon.autoencoder import convert_autoencoder
from torchmn.experiment.neon.balance import convert_balance
from torchmn.experiment.neon.data import convert_dataset
from torchmn.experiment.neon.keys import check_keys
from torchmn.experiment.neon.layer_tables import FLOAT32
from torchmn.experiment.neon.layers import ConvertedLayers, convert_layers
from torchmn.experiment.neon.rules import momentum
from torchmn.experiment.neon.shapes import sample_shape
from torchmn.experiment.neon.tables import ANCHOR_KEYS, BACKENDS, EMULATORS, EXPERIMENTS, KEYS, MODELS
from torchmn.experiment.neon.tagged_value import (
    OBJECT,
    TaggedValue,
    as_document,
    as_float,
    at,
    plain,
    read_nodes,
    same_object,
)
from torchmn.experiment.neon.values import METRICS, check_olayer, cost_of, one_of
from torchmn.modes import mode_of as mode_named

NEON_MODES = ("halopar", "vecpar", "modelpar", "datapar", "halodatapar")


def mode_of(experiment: TaggedValue, dataset: TaggedValue, model: TaggedValue, notes: list[str]) -> TaggedValue | None:
    """Returns the mode of the experiment, or None.

    Each argument may have dist_mode and dist_flag, which must be the same in all of them.

    Args:
        experiment: the neon experiment.
        dataset: its data set.
        model: its model.
        notes: receives a line if a mode is given, but switched off.
    """
    sections = (dataset, model, experiment)
    modes = [(section, found) for section in sections if (found := section.get("dist_mode")) is not None]
    flags = [(section, found) for section in sections if (found := section.get("dist_flag")) is not None]
    for section, found in modes:
        section.string("dist_mode")
        if found.value not in NEON_MODES:
            raise ExperimentError(
                f"{found.where}: the dist_mode {found.value!r} is not supported. {nearest(found.value, NEON_MODES)}"
            )
    for _, found in flags:
        if not isinstance(found.value, bool):
            raise ExperimentError(f"{found.where}: expected dist_flag to be True or False, got {plain(found)!r}")
    for key, found in (("dist_mode", modes), ("dist_flag", flags)):
        different = [(section, value) for section, value in found if _meaning(value) != _meaning(found[0][1])]
        if different:
            section, value = different[0]
            first_section, first = found[0]
            raise ExperimentError(
                f"{value.where}: {key} is {value.value} in {section.kind}, and {first.value} in {first_section.kind}: "
                "they must be the same"
            )
    if not modes:
        if flags and flags[0][1].value:
            where = flags[0][1].where
            raise ExperimentError(
                f"{where}: dist_flag: True needs a dist_mode in the data set: {', '.join(NEON_MODES)}"
            )
        return None
    mode = modes[0][1]
    if not flags or not flags[0][1].value:
        reason = "dist_flag is False" if flags else "there is no dist_flag: True"
        notes.append(f"{mode.where}: dist_mode has no effect: {reason}, and neon runs on one rank")
        return None
    return TaggedValue(mode_named(mode.value).name, mode.where)


def _meaning(mode_or_flag: TaggedValue) -> str | bool:
    """Returns a flag, or the name of a mode: `modelpar` and `vecpar` are the same one."""
    value = mode_or_flag.value
    return value if isinstance(value, bool) else mode_named(value).name


def batch_size_of(dataset: TaggedValue, local: TaggedValue, mode: TaggedValue | None, notes: list[str]) -> TaggedValue:
    """Returns the batch size over all ranks.

    Args:
        dataset: the data set, whose batch_size is that over all ranks under datapar.
        local: batch_size of the model, under datapar that of one rank.
        mode: of the experiment.
        notes: receives a line if a batch_size has no effect.
    """
    total = dataset.get("batch_size")
    if mode is None or mode.value != "datapar":
        if total is not None:
            notes.append(f"{total.where}: batch_size of a data set has no effect: neon reads it in datapar only")
        return local
    if total is None:
        raise ExperimentError(
            f"{local.where}: batch_size {plain(local)} is that of one rank in datapar: the data set needs a "
            "batch_size, that of all ranks together"
        )
    if plain(total) != plain(local):
        notes.append(
            f"{local.where}: batch_size {plain(local)} was that of one rank: {plain(total)}, of all ranks together, is "
            "used"
        )
    return total


UNSUPPORTED_MODELS = {
    "RNN": "it keeps its state from batch to batch. Here a sample is a sequence: in TorchMN's format, `dataset: {name: "
    "text, length: 20}`, `- lstm: {units: 64}` (or rnn, gru) and `- linear: 96` predict the next character",
    "RBM": "it is trained without labels. In TorchMN's format, put `- rbm: {units: 500, pretraining: {epochs: 1, lr: "
    "0.1}}` before a last `- linear: 10`",
    "DBN": "it is trained without labels. In TorchMN's format, put several `- rbm: {units: 500, pretraining: {epochs: "
    "1, lr: 0.1}}` before a last `- linear: 10`",
}
"""Models of neon that are not converted, with the alternative."""
# neon's metrics for a file without any.
DEFAULT_METRIC = "misclassified_percentage"


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
            batch_size=size, default_rule=_rule_of_model(model), momentum=_momentum_of_model(model), shape=shape
        )
        if model.name == "Balance":
            costs, units = convert_balance(model, converted)
            new_model = {"layers": converted.layers, "cost": costs}
        else:
            convert_layers(layers, converted)
            reconstructs = model.name == "Autoencoder" and converted.cost is None
            target = "inputs" if reconstructs else converted.target
            new_model = {"layers": converted.layers, "cost": _cost(model, converted), "target": target}
        optimizer = _optimizer(converted)
        notes += [*converted.notes, *_unused_rule(model, converted)]
    _check_saved_model(model, notes)
    new_experiment: dict[str, Any] = {
        "dataset": dataset,
        "model": new_model,
        "optimizer": optimizer,
        "epochs": _required(model, "num_epochs"),
        "batch_size": batch_size_of(source, size, mode, notes),
        "seed": _seed(experiment, notes),
        "metrics": _metrics(experiment, model, dataset, units, notes)
        or _default_metrics(experiment, new_model, dataset, units, notes),
        "parallel": None if mode is None else at(mode.where, {"mode": mode}),
        "shuffle": False,
        "drop_last": True,
        "predictions": _predictions(experiment, dataset, notes),
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
    check_olayer(found, converted.last)
    return cost_of(found, converted.batch_size)


def _rule_of_model(model: TaggedValue) -> TaggedValue | None:
    """Returns the default learning rule of the layers, which models had in 2014, or None."""
    rate = model.get("learning_rate")
    if rate is None:
        return None
    return at(rate.where, {"name": "sgd", "lr": as_float(rate), **_momentum_of_model(model)})


def _momentum_of_model(model: TaggedValue) -> dict[str, Any]:
    found = model.get("momentum") or model.get("momentum_params")
    return momentum(found) if found is not None else {}


def _unused_rule(model: TaggedValue, converted: ConvertedLayers) -> list[str]:
    """Returns notes on the keys of the model's learning rule that no layer uses."""
    notes = []
    for key in ("learning_rate", "momentum", "momentum_params"):
        found = model.get(key)
        if found is None:
            continue
        if key == "momentum_params" and model.get("momentum") is not None:
            notes.append(f"{found.where}: momentum_params has no effect: there is momentum")
        elif key == "learning_rate" and key not in converted.used:
            notes.append(f"{found.where}: learning_rate has no effect: each layer has a learning rule or rate")
        elif key != "learning_rate" and "momentum" not in converted.used:
            notes.append(f"{found.where}: {key} has no effect: each layer has a learning rule")
        elif key != "learning_rate" and model.get("learning_rate") is None and "rate" not in converted.used:
            notes.append(f"{found.where}: {key} has no effect: there is no learning_rate")
    return notes


def _check_saved_model(model: TaggedValue, notes: list[str]) -> None:
    """Raises an ExperimentError if the model continues from a file that exists."""
    found = model.get("deserialized_path")
    if found is None:
        return
    if Path(str(plain(found))).expanduser().exists():
        raise ExperimentError(
            f"{found.where}: deserialized_path {str(plain(found))!r}: neon's saved models are not read: remove the key "
            "to begin with the initial weights"
        )
    notes.append(
        f"{found.where}: deserialized_path {str(plain(found))!r} does not exist: training begins with the initial "
        "weights"
    )


def _optimizer(converted: ConvertedLayers) -> TaggedValue:
    """Returns the most common learning rule, and adds the option `optimizer` to layers with another one."""
    if not converted.rules:
        raise ExperimentError(f"{converted.layers[0].where}: no layer has weights to train")
    texts = [repr(plain(rule)) for _, rule in converted.rules]
    common = converted.rules[texts.index(Counter(texts).most_common(1)[0][0])][1]
    default = plain(common)
    for (layer, rule), text in zip(converted.rules, texts, strict=True):
        if text == repr(default):
            continue
        options = plain(rule)
        different = {key for key in options.keys() | default.keys() if options.get(key) != default.get(key)}
        if different - {"lr", "momentum", "weight_decay"}:
            raise ExperimentError(
                f"{rule.where}: the learning rules of layers differ in {', '.join(sorted(different))}; only lr, "
                "momentum and weight_decay may differ between layers"
            )
        given = {key: value for key, value in options.items() if key in different}
        layer.value["optimizer"] = at(rule.where, given | dict.fromkeys(different - given.keys(), 0.0))
    return common


def _seed(experiment: TaggedValue, notes: list[str]) -> TaggedValue | None:
    backend = experiment.get("backend")
    if backend is None:
        return None
    one_of(BACKENDS, backend, "the back end")
    if backend.name in EMULATORS:
        notes.append(f"{backend.where}: the back end {backend.kind} has no effect: {FLOAT32.note}")
    return backend.get("rng_seed")


def _splits(dataset: TaggedValue) -> tuple[str, ...]:
    return ("train", "validation", "test") if dataset.get("validation") is not None else ("train", "test")


def _metrics(
    experiment: TaggedValue, model: TaggedValue, dataset: TaggedValue, units: tuple[int, int] | None, notes: list[str]
) -> dict[str, list[TaggedValue]] | None:
    """Returns the metrics of each split; neon's metrics at the end and after each epoch are combined."""
    by_split: dict[str, dict[str, TaggedValue]] = {}
    at_end = None if experiment.name == "FitExperiment" else experiment.get("metrics") or _inference_metrics(experiment)
    for found in (at_end, model.get("epoch_metrics")):
        for split, group in found.items() if found is not None else ():
            if split not in _splits(dataset):
                notes.append(f"{group.where}: metrics of {split} have no effect: there are no such samples")
                continue
            for metric in group.value if isinstance(group.value, list) else [group]:
                name, rank = one_of(METRICS, metric, "the metric"), metric.plain("error_rank", 1)
                options: dict[str, Any] = {"top": rank} if rank != 1 else {}
                if units is not None:
                    options["units"] = list(units)
                    options |= {"outputs": "probabilities"} if name.startswith("log_loss") else {}
                value = at(metric.where, {"name": name, **options} if options else name)
                by_split.setdefault(split, {}).setdefault(f"{name} {rank}", value)
    return {split: list(metrics.values()) for split, metrics in by_split.items()} or None


def _inference_splits(experiment: TaggedValue) -> list[str]:
    """Returns the splits of `inference_sets`; by default both."""
    found = experiment.get("inference_sets")
    splits = ["train", "test"] if found is None else plain(found)
    splits = [splits] if isinstance(splits, str) else splits
    if found is not None and (not isinstance(splits, list) or not all(isinstance(split, str) for split in splits)):
        raise ExperimentError(f"{found.where}: expected inference_sets to be a list of splits, got {str(splits)[:60]}")
    return splits


def _inference_metrics(experiment: TaggedValue) -> TaggedValue | None:
    """Returns the `metrics` that `inference_metrics` and `inference_sets` stand for."""
    found = experiment.get("inference_metrics")
    return None if found is None else at(found.where, dict.fromkeys(_inference_splits(experiment), found))


def _default_metrics(
    experiment: TaggedValue,
    model: dict[str, Any],
    dataset: TaggedValue,
    units: tuple[int, int] | None,
    notes: list[str],
) -> dict[str, list[Any]] | None:
    """Returns the metrics of FitPredictErrorExperiment, unless metrics are given or the targets are not classes."""
    given = experiment.get("metrics") is not None or experiment.name == "FitExperiment"
    if given or model.get("target") == "inputs" or dataset.plain("name") in ("housing", "sparsenet"):
        return None
    metric = {"name": DEFAULT_METRIC, "units": list(units)} if units else DEFAULT_METRIC
    missing = [split for split in _inference_splits(experiment) if split not in _splits(dataset)]
    if missing:
        found = experiment.get("inference_sets") or experiment
        notes.append(f"{found.where}: inference_sets has no effect for {missing[0]}: there are no such samples")
    return {split: [metric] for split in _inference_splits(experiment) if split not in missing}


def _predictions(experiment: TaggedValue, dataset: TaggedValue, notes: list[str]) -> list[str] | None:
    found = experiment.get("predictions")
    if found is None or experiment.name == "FitExperiment":
        return None
    splits = [plain(found)] if isinstance(plain(found), str) else plain(found)
    if not isinstance(splits, list):
        raise ExperimentError(f"{found.where}: expected predictions to be a list of splits, got {str(splits)[:60]!r}")
    missing = [split for split in splits if split not in _splits(dataset)]
    if missing:
        notes.append(f"{found.where}: predictions of {missing[0]} have no effect: there are no such samples")
    return [split for split in splits if split not in missing] or None
