"""Converts neon's GB model: stacks of local filters, L2 pooling and contrast normalisation, and a classifier."""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.tagged_value import TaggedValue, as_float, at, plain
from torchmn.experiment.neon.layers import ConvertedLayers, convert_layers, rule_of
from torchmn.experiment.neon.terms.rules import beside
from torchmn.experiment.neon.terms.shapes import Shape
from torchmn.experiment.neon.terms.values import COSTS, check_cost, one_of

STACK = ("LocalFilteringLayer", "L2PoolingLayer", "LCNLayer")
CLASSIFIERS = ("Layer", "LayerWithNoBias", "FCLayer")
CLASSIFIER = {"bias": False, "init": {"name": "uniform", "low": -0.1, "high": 0.1}, "activation": "logistic"}
"""Options of a neon classifier that equal those of TorchMN's autoencoder; others are not supported."""


def convert_autoencoder(
    model: TaggedValue, shape: Shape | None, notes: list[str]
) -> tuple[TaggedValue, TaggedValue, TaggedValue]:
    """Converts a GB model.

    Args:
        model: the GB model.
        shape: of a sample.
        notes: receives a line for each key without effect.

    Returns:
        The sections `autoencoder`, `cost` and `optimizer` of the experiment.
    """
    layers = model.get("layers")
    assert layers is not None
    stacks, classifier = _stacks_and_classifier(model, layers)
    converted = ConvertedLayers(batch_size=model.get("batch_size"), shape=shape, pretrained=True)
    convert_layers(layers, converted)
    notes += converted.notes
    filters, pools, norms = stacks[::3], stacks[1::3], stacks[2::3]
    for layer in stacks:
        if layer.plain("stride", 1) != 1:
            raise ExperimentError(f"{layer.where}: {model.kind} is supported with stride 1 only")
        if layer.plain("pad", 0):
            raise ExperimentError(f"{layer.where}: {model.kind} is supported without pad only")
    new_filters = [layer.value["local"] for layer in converted.layers if "local" in layer.value]
    for layer, new_filter in zip(filters, new_filters, strict=True):
        _check_filter(layer, new_filter)
    _check_classifier(classifier, converted.layers[-1].value["linear"])
    optimizer, classifier_options = _rules(model, filters, converted)
    autoencoder: dict[str, Any] = {
        "maps": _same(filters, "nofm"),
        "kernels": [_side(layer) for layer in filters],
        "pool": _same_side(pools),
        "norm": _same_side(norms),
        "classes": classifier.get("nout"),
        "tied": _same(filters, "tied_weights"),
        "sparsity": _sparsity(filters),
        "pretraining": {
            "epochs": model.get("num_pretrain_epochs") if model.plain("pretraining", True) else 0,
            "lr": _pretraining_rate(filters[0], optimizer),
        },
        "classifier_epochs": model.get("num_initial_epochs"),
        "classifier": classifier_options,
    }
    return at(model.where, autoencoder), _cost(model, layers, classifier), optimizer


def _stacks_and_classifier(model: TaggedValue, layers: TaggedValue) -> tuple[list[TaggedValue], TaggedValue]:
    inner = [layer for layer in layers.value if layer.name not in ("DataLayer", "CostLayer")]
    names = [layer.name for layer in inner[:-1]]
    if not names or inner[-1].name not in CLASSIFIERS or names != list(STACK) * (len(names) // 3):
        raise ExperimentError(
            f"{layers.where}: {model.kind} is supported as stacks of {', '.join(STACK)}, and a last Layer, got "
            f"{', '.join(layer.kind or '?' for layer in inner)}"
        )
    return inner[:-1], inner[-1]


def _parameters(layer: TaggedValue) -> TaggedValue:
    """Returns the parameters of a layer's learning rule, empty without one."""
    rule = rule_of(layer)
    return (rule.get("lr_params") if rule is not None else None) or at(layer.where, {})


def _pretraining_rate(layer: TaggedValue, optimizer: TaggedValue) -> TaggedValue | None:
    """Returns the learning rate of pretraining: that of training if there is no other."""
    found = _parameters(layer).get("pretrain_learning_rate")
    return optimizer.get("lr") if found is None else as_float(found)


def _rules(
    model: TaggedValue, filters: list[TaggedValue], converted: ConvertedLayers
) -> tuple[TaggedValue, TaggedValue | None]:
    """Returns the optimizer of the filters, and the options in which that of the classifier differs."""
    *of_filters, of_classifier = (rule.weights for _, rule in converted.rules)
    rules = [plain(_parameters(layer)) for layer in filters]
    for layer, params, rule in zip(filters, rules, of_filters, strict=True):
        if params != rules[0] or plain(rule) != plain(of_filters[0]):
            raise ExperimentError(
                f"{(rule_of(layer) or layer).where}: {model.kind}: all local filters must have the same learning rule"
            )
    common = of_filters[0]
    return common, None if plain(of_classifier) == plain(common) else beside(of_classifier, common)


def _check_filter(layer: TaggedValue, converted: TaggedValue) -> None:
    """Filters must be linear and initially uniform around 0; the range has no effect, as filters are normalised."""
    init = converted.plain("init")
    if init["name"] != "uniform" or init["low"] != -init["high"]:
        found = layer.get("weight_init") or layer
        raise ExperimentError(
            f"{found.where}: {layer.kind}: expected weight_init to be uniform with low = -high, got {init}"
        )
    if converted.get("activation") is not None:
        where = converted.value["activation"].where
        raise ExperimentError(f"{where}: {layer.kind}: expected the activation to be Linear in GB")


def _check_classifier(layer: TaggedValue, converted: TaggedValue) -> None:
    for key, expected in CLASSIFIER.items():
        if converted.plain(key) != expected:
            found = layer.get({"init": "weight_init", "bias": "nin"}.get(key, key)) or layer
            raise ExperimentError(
                f"{found.where}: {layer.kind}: the classifier of GB is supported with {key}: {expected}, got "
                f"{converted.plain(key)}"
            )
    if converted.plain("batch_norm"):
        raise ExperimentError(f"{layer.where}: {layer.kind}: the classifier of GB has no batch_norm")


def _cost(model: TaggedValue, layers: TaggedValue, classifier: TaggedValue) -> TaggedValue:
    """Returns the cost of supervised training; that of pretraining must be the autoencoder's."""
    last = layers.value[-1]
    found = last.get("cost") if last.name == "CostLayer" else model.get("cost")
    if found is not None and one_of(COSTS, found, "the cost") != "cross_entropy":
        raise ExperimentError(f"{found.where}: {model.kind} is supported with the cost CrossEntropy, got {found.kind}")
    if found is not None:
        check_cost(found, classifier)
    first = model.get("pretrain_cost")
    if first is not None and (one_of(COSTS, first, "the cost") != "sum_squared" or first.number("scale", 1.0) != 1):
        raise ExperimentError(f"{first.where}: {model.kind} is supported with the pretrain_cost SumSquaredDiffs only")
    scale = 1.0 if found is None else found.number("scale", 1.0)
    name = "binary_cross_entropy"
    return at((found or model).where, name if scale == 1.0 else {"name": name, "scale": scale})


def _side(layer: TaggedValue) -> TaggedValue:
    shape = layer.get("fshape")
    sides = plain(shape) if shape is not None else None
    if shape is None or not isinstance(sides, list) or len(set(map(str, sides))) != 1:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs a square fshape here, such as [3, 3]")
    return TaggedValue(sides[0], shape.where)


def _same(layers: list[TaggedValue], key: str) -> TaggedValue | None:
    values = [layer.plain(key) for layer in layers]
    if any(value != values[0] for value in values):
        raise ExperimentError(f"{layers[-1].where}: {key} must be the same in all stacks, got {values}")
    return layers[0].get(key)


def _sparsity(filters: list[TaggedValue]) -> TaggedValue | None:
    found = _same(filters, "sparsity")
    return None if found is None else as_float(found)


def _same_side(layers: list[TaggedValue]) -> TaggedValue:
    sides = [_side(layer) for layer in layers]
    if any(side.value != sides[0].value for side in sides):
        raise ExperimentError(f"{layers[-1].where}: fshape must be the same in all stacks of {layers[0].kind}")
    return sides[0]
