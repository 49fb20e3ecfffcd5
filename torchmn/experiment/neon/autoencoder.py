"""neon's GB model: stacks of local filters, L2 pools and contrast normalisation, and a classifier."""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.neon.layers import Chain, convert_layers, rule_of
from torchmn.experiment.neon.shapes import Shape
from torchmn.experiment.neon.tagged_value import Said, at, number_of, plain
from torchmn.experiment.neon.values import COSTS, one_of

STACK = ("LocalFilteringLayer", "L2PoolingLayer", "LCNLayer")
CLASSIFIERS = ("Layer", "LayerWithNoBias", "FCLayer")
CLASSIFIER = {"bias": False, "init": {"name": "uniform", "low": -0.1, "high": 0.1}, "activation": "logistic"}
"""How the classifier of our autoencoder begins, and what its cost takes its outputs through."""


def convert_autoencoder(model: Said, shape: Shape | None, notes: list[str]) -> tuple[Said, Said, Said]:
    """Our autoencoder, its cost, and the optimizer of its training with labels.

    Args:
        model: the GB model.
        shape: of a sample.
        notes: gets a line for each key that has no meaning in it.
    """
    layers = model.get("layers")
    assert layers is not None
    every = [layer for layer in layers.value if layer.name not in ("DataLayer", "CostLayer")]
    stacks, classifier = every[:-1], every[-1] if every else None
    names = [layer.name for layer in stacks]
    if (
        classifier is None
        or classifier.name not in CLASSIFIERS
        or not names
        or names != list(STACK) * (len(names) // 3)
    ):
        raise ExperimentError(
            f"{layers.where}: {model.kind} is supported as stacks of {', '.join(STACK)}, and a last Layer; it has "
            f"{', '.join(layer.kind or '?' for layer in every)}"
        )
    chain = Chain(batch_size=model.get("batch_size"), shape=shape, pretrained=True)
    convert_layers(layers, chain)
    notes += chain.notes
    filters, pools, norms = stacks[::3], stacks[1::3], stacks[2::3]
    for layer in stacks:
        if layer.plain("stride", 1) != 1:
            raise ExperimentError(f"{layer.where}: {model.kind} is supported with stride 1 only")
        if layer.plain("pad", 0):
            raise ExperimentError(f"{layer.where}: {model.kind} is supported without pad only")
    converted = [layer.value["local"] for layer in chain.layers if "local" in layer.value]
    for layer, filter_of_ours in zip(filters, converted, strict=True):
        _check_filter(layer, filter_of_ours)
    _check_classifier(classifier, chain.layers[-1].value["linear"])
    common, own = _rules(model, filters, classifier, chain)
    params = _rule(filters[0]).get("lr_params") or at(layers.where, {})
    before = params.get("pretrain_learning_rate")
    ours: dict[str, Any] = {
        "maps": _same(filters, "nofm"),
        "kernels": [_side(layer) for layer in filters],
        "pool": _same_side(pools),
        "norm": _same_side(norms),
        "classes": classifier.get("nout"),
        "tied": _same(filters, "tied_weights"),
        "sparsity": _sparsity(filters),
        "pretraining": {
            "epochs": model.get("num_pretrain_epochs") if model.plain("pretraining", True) else 0,
            "lr": None if before is None else number_of(before),
        },
        "classifier_epochs": model.get("num_initial_epochs"),
        "classifier": own,
    }
    return at(model.where, ours), _cost(model, layers), common


def _rule(layer: Said) -> Said:
    rule = rule_of(layer)
    if rule is None:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs a learning rule")
    return rule


def _rules(model: Said, filters: list[Said], classifier: Said, chain: Chain) -> tuple[Said, Said | None]:
    """The rule of the filters, and where the classifier learns otherwise."""
    *of_filters, of_classifier = (rule for _, rule in chain.rules)
    rules = [plain(_rule(layer).get("lr_params") or at(layer.where, {})) for layer in filters]
    for layer, params, rule in zip(filters, rules, of_filters, strict=True):
        if params != rules[0] or plain(rule) != plain(of_filters[0]):
            raise ExperimentError(f"{_rule(layer).where}: {model.kind}: all local filters must have the same rule")
    _rule(classifier)
    common, theirs = of_filters[0], of_classifier
    apart = {key: value for key, value in theirs.items() if plain(value) != common.plain(key)}
    if theirs.plain("name") != common.plain("name"):
        raise ExperimentError(f"{theirs.where}: {model.kind}: the classifier must learn by a rule of the filters' type")
    apart |= {key: at(theirs.where, 0.0) for key in common.value if key not in theirs.value}
    return common, at(theirs.where, apart) if apart else None


def _check_filter(layer: Said, ours: Said) -> None:
    """Filters are linear, and begin uniform about 0; how far does not matter, as each is scaled to length 1."""
    init = ours.plain("init")
    if init["name"] != "uniform" or init["low"] != -init["high"]:
        found = layer.get("weight_init") or layer
        raise ExperimentError(
            f"{found.where}: {layer.kind}: expected weight_init to be uniform with low = -high, got {init}"
        )
    if ours.get("activation") is not None:
        raise ExperimentError(f"{ours.value['activation'].where}: {layer.kind}: its activation must be Linear in GB")


def _check_classifier(layer: Said, ours: Said) -> None:
    for key, expected in CLASSIFIER.items():
        if ours.plain(key) != expected:
            found = layer.get({"init": "weight_init", "bias": "nin"}.get(key, key)) or layer
            raise ExperimentError(
                f"{found.where}: {layer.kind}: the classifier of GB is supported with {key}: {expected}, got "
                f"{ours.plain(key)}"
            )
    if ours.plain("batch_norm"):
        raise ExperimentError(f"{layer.where}: {layer.kind}: the classifier of GB has no batch_norm")


def _cost(model: Said, layers: Said) -> Said:
    """The cost of the training with labels; that of pretraining is what the autoencoder has."""
    last = layers.value[-1]
    found = last.get("cost") if last.name == "CostLayer" else model.get("cost")
    if found is not None and one_of(COSTS, found, "the cost") != "cross_entropy":
        raise ExperimentError(f"{found.where}: {model.kind} is supported with the cost CrossEntropy, got {found.kind}")
    before = model.get("pretrain_cost")
    if before is not None and (one_of(COSTS, before, "the cost") != "sum_squared" or before.number("scale", 1.0) != 1):
        raise ExperimentError(f"{before.where}: {model.kind} is supported with the pretrain_cost SumSquaredDiffs only")
    scale = 1.0 if found is None else found.number("scale", 1.0)
    name = "binary_cross_entropy"
    return at((found or model).where, name if scale == 1.0 else {"name": name, "scale": scale})


def _side(layer: Said) -> Said:
    shape = layer.get("fshape")
    sides = plain(shape) if shape is not None else None
    if shape is None or not isinstance(sides, list) or len(set(map(str, sides))) != 1:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs a square fshape here, as [3, 3]")
    return Said(sides[0], shape.where)


def _same(layers: list[Said], key: str) -> Said | None:
    values = [layer.plain(key) for layer in layers]
    if any(value != values[0] for value in values):
        raise ExperimentError(f"{layers[-1].where}: {key} must be the same in all stacks, got {values}")
    return layers[0].get(key)


def _sparsity(filters: list[Said]) -> Said | None:
    found = _same(filters, "sparsity")
    return None if found is None else number_of(found)


def _same_side(layers: list[Said]) -> Said:
    sides = [_side(layer) for layer in layers]
    if any(side.value != sides[0].value for side in sides):
        raise ExperimentError(f"{layers[-1].where}: fshape must be the same in all stacks of {layers[0].kind}")
    return sides[0]
