"""convert: the tree of a neon experiment file in, our experiment with notes on what was left out."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from yaml.nodes import Node

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.document import Document, children
from torchmn.experiment.neon.autoencoder import convert_autoencoder
from torchmn.experiment.neon.balance import convert_balance
from torchmn.experiment.neon.data import convert_dataset
from torchmn.experiment.neon.keys import check_keys
from torchmn.experiment.neon.layers import Chain, convert_layers
from torchmn.experiment.neon.rules import momentum
from torchmn.experiment.neon.shapes import of_data
from torchmn.experiment.neon.tables import BACKENDS, EXPERIMENTS, HOLDERS, KEYS, MODELS
from torchmn.experiment.neon.tagged_value import OBJECT, Said, as_document, at, number_of, plain, read_nodes
from torchmn.experiment.neon.values import METRICS, cost_of, one_of
from torchmn.modes import mode_of as mode_named

MODES = ("halopar", "vecpar", "datapar", "halodatapar")
"""Those of neon."""


def mode_of(experiment: Said, dataset: Said, model: Said, notes: list[str]) -> Said | None:
    """The mode that the data set, the model or the experiment names; they must not contradict each other.

    Args:
        experiment: may have dist_flag and dist_mode.
        dataset: as well.
        model: as well.
        notes: gets a line where a mode is named, and switched off.
    """
    parts = (dataset, model, experiment)
    modes = [(part, found) for part in parts if (found := part.get("dist_mode")) is not None]
    flags = [(part, found) for part in parts if (found := part.get("dist_flag")) is not None]
    for part, found in modes:
        part.word("dist_mode")
        if found.value not in MODES:
            raise ExperimentError(
                f"{found.where}: the dist_mode {found.value!r} is not supported. {nearest(found.value, MODES)}"
            )
    for _, found in flags:
        if not isinstance(found.value, bool):
            raise ExperimentError(f"{found.where}: expected dist_flag to be True or False, got {plain(found)!r}")
    for key, found in (("dist_mode", modes), ("dist_flag", flags)):
        others = [(part, value) for part, value in found if value.value != found[0][1].value]
        if others:
            part, value = others[0]
            first, named = found[0]
            raise ExperimentError(
                f"{value.where}: {key} is {value.value} in {part.kind}, and {named.value} in {first.kind}: they must "
                "be the same"
            )
    if not modes:
        if flags and flags[0][1].value:
            where = flags[0][1].where
            raise ExperimentError(f"{where}: dist_flag: True needs a dist_mode in the data set: {', '.join(MODES)}")
        return None
    mode = modes[0][1]
    if not flags or not flags[0][1].value:
        why = "dist_flag is False" if flags else "there is no dist_flag: True"
        notes.append(f"{mode.where}: dist_mode has no meaning today: {why}, and neon runs on one rank")
        return None
    return Said(mode_named(mode.value).name, mode.where)


def batch_size_of(dataset: Said, own: Said, mode: Said | None, notes: list[str]) -> Said:
    """The batch of all ranks: under datapar that of the data set, where the model says the share of one rank."""
    whole = dataset.get("batch_size")
    if mode is None or mode.value != "datapar":
        if whole is not None:
            notes.append(f"{whole.where}: batch_size of a data set has no meaning today: neon reads it in datapar only")
        return own
    if whole is None:
        raise ExperimentError(
            f"{own.where}: batch_size {plain(own)} is that of one rank in datapar: the data set needs a batch_size, "
            "that of all ranks together"
        )
    if plain(whole) != plain(own):
        notes.append(
            f"{own.where}: batch_size {plain(own)} was that of one rank: {plain(whole)}, of all ranks together, is used"
        )
    return whole


# What neon had and is not read: where its users find the same.
ELSEWHERE = {
    "RNN": "it carries its state from batch to batch. Here a sample is a sequence: in our format, `dataset: {name: "
    "text, length: 20}`, `- lstm: {units: 64}` (or rnn, gru) and `- linear: 96` predict the next character",
    "RBM": "it ends without labels. In our format, `- rbm: {units: 500, pretraining: {epochs: 1, lr: 0.1}}` stands "
    "before a last `- linear: 10`",
    "DBN": "it ends without labels. In our format, several `- rbm: {units: 500, pretraining: {epochs: 1, lr: 0.1}}` "
    "stand before a last `- linear: 10`",
}
# What neon measured where a file says nothing.
DEFAULT_METRIC = {"train": ["misclassified_percentage"], "test": ["misclassified_percentage"]}


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
    notes = check_keys(said, KEYS, HOLDERS)
    source, units = _dataset_of(said), None
    dataset = convert_dataset(source, notes)
    mode = mode_of(said, source, model, notes)
    size = _needed(model, "batch_size")
    shape = of_data(dataset)
    if model.name == "GB":
        autoencoder, cost, optimizer = convert_autoencoder(model, shape, notes)
        ours_model: dict[str, Any] = {"autoencoder": autoencoder, "cost": cost}
    else:
        chain = Chain(batch_size=size, default_rule=_rule_of_model(model), shape=shape)
        if model.name == "Balance":
            costs, units = convert_balance(model, chain)
            ours_model = {"layers": chain.layers, "cost": costs}
        else:
            convert_layers(layers, chain)
            ours_model = {"layers": chain.layers, "cost": _cost(model, chain), "target": chain.target}
        optimizer = _optimizer(chain)
        notes += [*chain.notes, *_unused_rule(model, chain)]
    ours: dict[str, Any] = {
        "dataset": dataset,
        "model": ours_model,
        "optimizer": optimizer,
        "epochs": _needed(model, "num_epochs"),
        "batch_size": batch_size_of(source, size, mode, notes),
        "seed": _seed(said),
        "metrics": _metrics(said, model, dataset, units, notes) or _default_metrics(said, ours_model, dataset, units),
        "parallel": None if mode is None else at(mode.where, {"mode": mode}),
        "shuffle": False,
        "drop_last": True,
        "predictions": _predictions(said, dataset, notes),
    }
    return Converted(as_document(name, at(said.where, ours)), notes)


def _needed(said: Said, key: str) -> Said:
    found = said.get(key)
    if found is None:
        raise ExperimentError(f"{said.where}: {said.kind or 'this'} needs the key {key!r}")
    return found


def _dataset_of(said: Said) -> Said:
    found, several = said.get("dataset"), said.get("datasets")
    if found is not None and several is not None:
        raise ExperimentError(f"{several.where}: the experiment has both dataset and datasets: expected one of them")
    found = found or several
    if found is not None and isinstance(found.value, list) and len(found.value) == 1:
        found = found.value[0]
    if found is None:
        raise ExperimentError(f"{said.where}: the experiment must have the key 'dataset'")
    return found


def _cost(model: Said, chain: Chain) -> Said:
    found = model.get("cost")
    if chain.cost is not None:
        if found is not None:
            chain.notes.append(
                f"{found.where}: cost has no meaning today: there is a CostLayer, and neon takes its cost"
            )
        return chain.cost
    if found is None:
        raise ExperimentError(f"{model.where}: there is neither a CostLayer nor a cost")
    return cost_of(found, chain.batch_size)


def _rule_of_model(model: Said) -> Said | None:
    """The rule of all layers that have none, which models had in 2014."""
    rate = model.get("learning_rate")
    if rate is None:
        return None
    found = model.get("momentum") or model.get("momentum_params")
    more = momentum(found) if found is not None else {}
    return at(rate.where, {"name": "sgd", "lr": number_of(rate), **more})


def _unused_rule(model: Said, chain: Chain) -> list[str]:
    """Lines for the rule of a model where it is no layer's."""
    if chain.default_rule is not None and any(rule is chain.default_rule for _, rule in chain.rules):
        return []
    why = "each layer has a rule of its own" if model.get("learning_rate") is not None else "there is no learning_rate"
    keys = ("learning_rate", "momentum", "momentum_params")
    return [
        f"{found.where}: {key} has no meaning today: {why}" for key in keys if (found := model.get(key)) is not None
    ]


def _optimizer(chain: Chain) -> Said:
    """The rule that most layers have; the others get theirs written to them."""
    if not chain.rules:
        raise ExperimentError(f"{chain.layers[0].where}: no layer has weights to be learnt")
    texts = [repr(plain(rule)) for _, rule in chain.rules]
    common = chain.rules[texts.index(Counter(texts).most_common(1)[0][0])][1]
    for (place, rule), text in zip(chain.rules, texts, strict=True):
        if text == repr(plain(common)):
            continue
        theirs, ours = plain(rule), plain(common)
        apart = {key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)}
        own = {key: value for key, value in theirs.items() if key in apart}
        if place < 0 or apart - {"lr", "momentum", "weight_decay"}:
            raise ExperimentError(
                f"{rule.where}: layers learn by rules that differ in {', '.join(sorted(apart))}; only lr, momentum and "
                "weight_decay may differ between layers"
            )
        missing = dict.fromkeys(apart - own.keys(), 0.0)
        layer = next(iter(chain.layers[place].value.values()))
        layer.value["optimizer"] = at(rule.where, own | missing)
    return common


def _seed(said: Said) -> Said | None:
    backend = said.get("backend")
    if backend is None:
        return None
    one_of(BACKENDS, backend, "the back end")
    return backend.get("rng_seed")


def _splits(dataset: Said) -> tuple[str, ...]:
    return ("train", "validation", "test") if dataset.get("validation") is not None else ("train", "test")


def _metrics(
    said: Said, model: Said, dataset: Said, units: tuple[int, int] | None, notes: list[str]
) -> dict[str, list[Said]] | None:
    """The metrics of each split: those of the end and those of each epoch are the same here."""
    ours: dict[str, dict[str, Said]] = {}
    at_end = None if said.name == "FitExperiment" else said.get("metrics")
    for found in (at_end, model.get("epoch_metrics")):
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


def _default_metrics(
    said: Said, model: dict[str, Any], dataset: Said, units: tuple[int, int] | None
) -> dict[str, list[Any]] | None:
    """neon's FitPredictErrorExperiment counts the wrong classes; there are none where numbers are reproduced."""
    given = said.get("metrics") is not None or said.name == "FitExperiment"
    if given or model.get("target") == "inputs" or dataset.plain("name") in ("housing", "sparsenet"):
        return None
    return {
        split: [{"name": name, "units": list(units)} if units else name for name in names]
        for split, names in DEFAULT_METRIC.items()
    }


def _predictions(said: Said, dataset: Said, notes: list[str]) -> list[str] | None:
    found = said.get("predictions")
    if found is None or said.name == "FitExperiment":
        return None
    asked = [plain(found)] if isinstance(plain(found), str) else plain(found)
    if not isinstance(asked, list):
        raise ExperimentError(f"{found.where}: expected predictions to be a list of splits, got {str(asked)[:60]!r}")
    missing = [split for split in asked if split not in _splits(dataset)]
    if missing:
        notes.append(f"{found.where}: predictions of {missing[0]}: there are no such samples here")
    return [split for split in asked if split not in missing] or None
