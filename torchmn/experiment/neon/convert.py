"""convert: the tree of a neon experiment file in, our experiment with notes on what was left out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node, SequenceNode

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.document import Document
from torchmn.experiment.neon.autoencoder import convert_autoencoder
from torchmn.experiment.neon.layers import Chain, convert_layers
from torchmn.experiment.neon.said import OBJECT, Said, as_document, at, plain, read_nodes
from torchmn.experiment.neon.values import COSTS, METRICS, one_of

EXPERIMENTS = ("FitExperiment", "FitPredictErrorExperiment", "GenOutputExperiment", "WriteErrorToFile")
DATASETS = {
    "MNIST": "mnist", "CIFAR10": "cifar10", "CIFAR100": "cifar100", "Iris": "iris", "ToyImages": "toy_images",
    "UniformRandom": "random",
}  # fmt: skip
MODELS = ("MLP", "MLPB", "Convnet", "GB", "Autoencoder")
MODES = {"halopar": "halopar", "vecpar": "modelpar", "datapar": "datapar", "halodatapar": "halodatapar"}
EMBEDDED = ("mnist", "iris", "toy_images", "random")
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
    """Whether a file is one of neon's: it names objects with !obj: somewhere near its top."""
    waiting, seen = [root], 0
    while waiting and seen < 1000:
        node, seen = waiting.pop(0), seen + 1
        if node.tag.startswith(OBJECT):
            return True
        if isinstance(node, MappingNode):
            waiting += [value for _, value in node.value]
        elif isinstance(node, SequenceNode):
            waiting += node.value
    return False


def convert(name: str, root: Node) -> Converted:
    """The experiment in a neon file; an ExperimentError with file and line for what is not supported."""
    said = read_nodes(name, root)
    try:
        return _convert(name, said)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
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
    if model.name not in MODELS:
        raise ExperimentError(
            f"{model.where}: the model {model.kind or 'without !obj:'} is not supported. {nearest(model.name, MODELS)}"
        )
    layers = model.get("layers")
    if layers is None:
        raise ExperimentError(f"{model.where}: {model.kind} needs the key 'layers'")
    if model.name == "GB":
        autoencoder, optimizer = convert_autoencoder(model)
        ours_model: dict[str, Any] = {"autoencoder": autoencoder, "cost": "binary_cross_entropy"}
        notes += _notes_of_model(model)
    else:
        chain = convert_layers(layers)
        notes += [*_notes_of_model(model), *chain.notes]
        ours_model = {"layers": chain.layers, "cost": _cost(said, model, chain), "target": chain.target}
        optimizer = _optimizer(model, chain)
    source = _dataset_of(said)
    ours: dict[str, Any] = {
        "dataset": _dataset(source, notes),
        "model": ours_model,
        "optimizer": optimizer,
        "epochs": _needed(model, "num_epochs"),
        "batch_size": _batch_size(said, model, source, notes),
        "seed": _seed(said),
        "metrics": _metrics(said),
        "parallel": _parallel(said),
        "shuffle": False,
        "drop_last": True,
        "predictions": [split for split in said.plain("predictions", []) if split in ("train", "test")] or None,
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


def _dataset(said: Said, notes: list[str]) -> Said:
    ours: dict[str, Any] = {"name": one_of(DATASETS, said, "the data set")}
    if (share := said.get("sample_pct")) is not None and share.value != 100:
        ours["sample"] = Said(f"{share.value}%", share.where)
    if (path := said.get("repo_path")) is not None:
        folder = Path(str(path.value)).expanduser()
        inside = next((folder / n for n in (said.name, said.name.lower()) if (folder / n).is_dir()), folder)
        if inside.is_dir() and ours["name"] not in ("iris", "toy_images", "random"):
            ours["path"] = Said(str(inside), path.where)
        elif ours["name"] in EMBEDDED:
            what = "the sample that comes with TorchMN" if ours["name"] == "mnist" else "what comes with TorchMN"
            notes.append(
                f"{path.where}: repo_path {str(path.value)!r} is not there or not needed: {what} is used, or --data DIR"
            )
    if (path := said.get("serialized_path")) is not None:
        notes.append(f"{path.where}: serialized_path: data is cached by its content, and each rank reads only its part")
    if ours["name"] == "random":
        sides = [said.plain(key) for key in ("nin", "nout", "ntrain", "ntest")]
        ours |= {
            "shape": [sides[0] or 10],
            "classes": sides[1] or 10,
            "train": sides[2] or 100,
            "test": sides[3] or 100,
        }
    for key in ("validation_pct", "num_test_sample"):
        if (found := said.get(key)) is not None:
            notes.append(f"{found.where}: {key} is ignored: all test samples are used, at any number of ranks")
    return at(said.where, ours)


def _cost(said: Said, model: Said, chain: Chain) -> Said:
    if chain.cost is not None:
        return chain.cost
    found = model.get("cost") or said.get("cost")
    if found is None:
        raise ExperimentError(f"{model.where}: there is neither a CostLayer nor a cost")
    return at(found.where, one_of(COSTS, found, "the cost"))


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


def _metrics(said: Said) -> list[Said] | None:
    found = said.get("metrics")
    if found is None:
        return None
    groups = found.value.values() if isinstance(found.value, dict) else [found]
    ours: dict[str, Said] = {}
    for group in groups:
        for metric in group.value if isinstance(group.value, list) else [group]:
            name, rank = one_of(METRICS, metric, "the metric"), metric.plain("error_rank", 1)
            ours.setdefault(name, at(metric.where, {"name": name, "top": rank} if rank != 1 else name))
    return list(ours.values())


def _parallel(said: Said) -> Said | None:
    mode = said.get("dist_mode")
    if mode is None or not said.plain("dist_flag", False):
        return None
    if mode.value not in MODES:
        raise ExperimentError(
            f"{mode.where}: the dist_mode {mode.value!r} is not supported. {nearest(mode.value, MODES)}"
        )
    return at(mode.where, {"mode": MODES[mode.value]})
