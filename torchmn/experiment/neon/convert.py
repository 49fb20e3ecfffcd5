"""convert: the tree of a neon experiment file in, our experiment with notes on what was left out."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from yaml.nodes import Node

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.document import Document, children
from torchmn.experiment.neon.autoencoder import convert_autoencoder
from torchmn.experiment.neon.balance import convert_balance
from torchmn.experiment.neon.data import convert_dataset
from torchmn.experiment.neon.layers import Chain, convert_layers
from torchmn.experiment.neon.said import OBJECT, Said, as_document, at, plain, read_nodes
from torchmn.experiment.neon.values import METRICS, cost_of, one_of

EXPERIMENTS = ("FitExperiment", "FitPredictErrorExperiment", "GenOutputExperiment", "WriteErrorToFile")
MODELS = ("MLP", "MLPB", "Convnet", "GB", "Autoencoder", "Balance")
# What neon had and is not read: where its users find the same.
ELSEWHERE = {
    "RNN": "it carries its state from batch to batch. Here a sample is a sequence: in our format, `dataset: {name: "
    "text, length: 20}`, `- lstm: {units: 64}` (or rnn, gru) and `- linear: 96` predict the next character",
    "RBM": "it ends without labels. In our format, `- rbm: {units: 500, pretraining: {epochs: 1, lr: 0.1}}` stands "
    "before a last `- linear: 10`",
    "DBN": "it ends without labels. In our format, several `- rbm: {units: 500, pretraining: {epochs: 1, lr: 0.1}}` "
    "stand before a last `- linear: 10`",
}
MODES = {"halopar": "halopar", "vecpar": "modelpar", "datapar": "datapar", "halodatapar": "halodatapar"}
# Of the experiment, the data set and the model: what had to do with neon's own machinery.
MACHINERY = ("backend", "logging", "diagnostics", "live", "return_item", "timing_plots", "step_print", "accumulate",
             "overwrite_list", "serialize_schedule", "save_checkpoints", "make_plots")  # fmt: skip


@dataclass(frozen=True)
class Converted:
    """Our experiment, whose places are those of the old file, and a line for each thing that was left out."""

    document: Document
    notes: list[str]
    is_neon: bool = True


def is_neon(root: Node) -> bool:
    """Whether a file is one of neon's: it names objects with !obj: somewhere."""
    waiting, seen = deque([root]), {id(root)}
    while waiting:
        node = waiting.popleft()
        if node.tag.startswith(OBJECT):
            return True
        new = {id(child): child for child in children(node) if id(child) not in seen}  # each once, for all aliases
        waiting += new.values()
        seen.update(new)
    return False


def convert(name: str, root: Node) -> Converted:
    """The experiment in a neon file; an ExperimentError with file and line for what is not supported."""
    said = read_nodes(name, root)
    try:
        return _convert(name, said)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value of a kind that no file of neon's has there.
        raise ExperimentError(f"{said.where}: this is not as neon's experiments are: {error}") from error


def _convert(name: str, said: Said) -> Converted:
    if said.kind is not None and said.name not in EXPERIMENTS:
        raise ExperimentError(
            f"{said.where}: the experiment {said.kind} is not supported. {nearest(said.name, EXPERIMENTS)}"
        )
    notes = [
        f"{value.where}: {key} has no meaning today, and is ignored" for key, value in said.items() if key in MACHINERY
    ]
    model = said.get("model")
    if model is None:
        raise ExperimentError(f"{said.where}: the experiment must have the key 'model'")
    if model.name in ELSEWHERE:
        raise ExperimentError(f"{model.where}: the model {model.kind} is not supported: {ELSEWHERE[model.name]}")
    if model.name not in MODELS:
        raise ExperimentError(
            f"{model.where}: the model {model.kind or 'without !obj:'} is not supported. {nearest(model.name, MODELS)}"
        )
    layers = model.get("layers")
    if layers is None:
        raise ExperimentError(f"{model.where}: {model.kind} needs the key 'layers'")
    source, units = _dataset_of(said), None
    if model.name == "GB":
        autoencoder, optimizer = convert_autoencoder(model)
        ours_model: dict[str, Any] = {"autoencoder": autoencoder, "cost": "binary_cross_entropy"}
        notes += _notes_of_model(model)
    else:
        size = _needed(model, "batch_size")
        if model.name == "Balance":
            chain, costs, units = convert_balance(model, size)
            ours_model = {"layers": chain.layers, "cost": costs}
        else:
            chain = convert_layers(layers, batch_size=size)
            ours_model = {"layers": chain.layers, "cost": _cost(said, model, chain), "target": chain.target}
        notes += [*_notes_of_model(model), *chain.notes]
        optimizer = _optimizer(model, chain)
    dataset = convert_dataset(source, notes)
    ours: dict[str, Any] = {
        "dataset": dataset,
        "model": ours_model,
        "optimizer": optimizer,
        "epochs": _needed(model, "num_epochs"),
        "batch_size": _batch_size(said, model, source, notes),
        "seed": _seed(said),
        "metrics": _metrics(said, model, dataset, units, notes),
        "parallel": _parallel(said),
        "shuffle": False,
        "drop_last": True,
        "predictions": _predictions(said, dataset),
    }
    return Converted(as_document(name, at(said.where, ours)), notes)


def _notes_of_model(model: Said) -> list[str]:
    notes = [
        f"{value.where}: {key} has no meaning today, and is ignored" for key, value in model.items() if key in MACHINERY
    ]
    for key in ("serialized_path", "deserialized_path"):
        if (path := model.get(key)) is not None:
            notes.append(f"{path.where}: {key}: --out keeps checkpoints, for any number of ranks, and --resume goes on")
    return notes


def _needed(said: Said, key: str) -> Said:
    found = said.get(key)
    if found is None:
        raise ExperimentError(f"{said.where}: {said.kind or 'this'} needs the key {key!r}")
    return found


def _dataset_of(said: Said) -> Said:
    found = said.get("dataset") or said.get("datasets")
    if found is not None and isinstance(found.value, list) and len(found.value) == 1:
        found = found.value[0]
    if found is None:
        raise ExperimentError(f"{said.where}: the experiment must have the key 'dataset'")
    return found


def _cost(said: Said, model: Said, chain: Chain) -> Said:
    if chain.cost is not None:
        return chain.cost
    found = model.get("cost") or said.get("cost")
    if found is None:
        raise ExperimentError(f"{model.where}: there is neither a CostLayer nor a cost")
    return cost_of(found, chain.batch_size)


def _optimizer(model: Said, chain: Chain) -> Said:
    """The rule that most layers have; the others get theirs written to them."""
    if not chain.rules:
        rate = model.get("learning_rate")
        if rate is not None:
            return at(rate.where, {"name": "sgd", "lr": Said(float(rate.value), rate.where)})
        raise ExperimentError(f"{model.where}: no layer has a learning rule (lrule_init)")
    texts = [repr(plain(rule)) for _, rule in chain.rules]
    common = chain.rules[texts.index(Counter(texts).most_common(1)[0][0])][1]
    for (place, rule), text in zip(chain.rules, texts, strict=True):
        if text == repr(plain(common)):
            continue
        theirs, ours = plain(rule), plain(common)
        apart = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
        own = {key: value for key, value in theirs.items() if key in apart}
        if place < 0 or apart - {"lr", "momentum", "weight_decay"} or isinstance(own.get("momentum", 0.0), dict):
            raise ExperimentError(
                f"{rule.where}: layers learn by rules that differ in {', '.join(sorted(apart))}; only lr, momentum and "
                "weight_decay may differ between layers"
            )
        missing = dict.fromkeys(apart - own.keys(), 0.0)
        layer = next(iter(chain.layers[place].value.values()))
        layer.value["optimizer"] = at(rule.where, own | missing)
    return common


def _batch_size(said: Said, model: Said, source: Said, notes: list[str]) -> Said:
    own, whole = _needed(model, "batch_size"), source.get("batch_size")
    if said.plain("dist_mode") == "datapar" and whole is not None and whole.value != own.value:
        notes.append(
            f"{own.where}: batch_size {own.value} was that of one rank: {whole.value}, of all ranks together, is used"
        )
        return whole
    return own


def _seed(said: Said) -> Said | None:
    backend = said.get("backend")
    return backend.get("rng_seed") if backend is not None else None


def _splits(dataset: Said) -> tuple[str, ...]:
    return ("train", "validation", "test") if dataset.get("validation") is not None else ("train", "test")


def _metrics(
    said: Said, model: Said, dataset: Said, units: tuple[int, int] | None, notes: list[str]
) -> dict[str, list[Said]] | None:
    """The metrics of each split: those of the end and those of each epoch are the same here."""
    ours: dict[str, dict[str, Said]] = {}
    for found in (said.get("metrics"), model.get("epoch_metrics")):
        for split, group in found.items() if found is not None else ():
            if split not in _splits(dataset):
                notes.append(f"{group.where}: metrics of {split}: there are no such samples here, and they are ignored")
                continue
            for metric in group.value if isinstance(group.value, list) else [group]:
                name, rank = one_of(METRICS, metric, "the metric"), metric.plain("error_rank", 1)
                about: dict[str, Any] = {"top": rank} if rank != 1 else {}
                if units is not None:
                    about["units"] = list(units)
                    about |= {"outputs": "probabilities"} if name.startswith("log_loss") else {}
                value = at(metric.where, {"name": name, **about} if about else name)
                ours.setdefault(split, {}).setdefault(f"{name} {rank}", value)
    return {split: list(metrics.values()) for split, metrics in ours.items()} or None


def _predictions(said: Said, dataset: Said) -> list[str] | None:
    found = said.get("predictions")
    asked = [] if found is None else plain(found)
    asked = [asked] if isinstance(asked, str) else asked
    if found is not None and not isinstance(asked, list):
        raise ExperimentError(f"{found.where}: expected predictions to be a list of splits, got {str(asked)[:60]!r}")
    return [split for split in asked if split in _splits(dataset)] or None


def _parallel(said: Said) -> Said | None:
    mode = said.get("dist_mode")
    if mode is None or not said.plain("dist_flag", False):
        return None
    said.word("dist_mode")
    if mode.value not in MODES:
        raise ExperimentError(
            f"{mode.where}: the dist_mode {mode.value!r} is not supported. {nearest(mode.value, MODES)}"
        )
    return at(mode.where, {"mode": MODES[mode.value]})
