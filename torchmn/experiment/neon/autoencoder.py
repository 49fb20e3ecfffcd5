"""neon's GB model: stacks of local filters, L2 pools and contrast normalisation, and a classifier."""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.neon.layers import RULE_KEYS
from torchmn.experiment.neon.said import Said, at, plain
from torchmn.experiment.neon.values import learning_rule

STACK = ("LocalFilteringLayer", "L2PoolingLayer", "LCNLayer")
CLASSIFIERS = ("Layer", "LayerWithNoBias", "FCLayer")


def convert_autoencoder(model: Said) -> tuple[Said, Said]:
    """Our autoencoder, and the optimizer of its training with labels."""
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
    filters, pools, norms = stacks[::3], stacks[1::3], stacks[2::3]
    if any(layer.plain("stride", 1) != 1 for layer in stacks):
        raise ExperimentError(f"{layers.where}: {model.kind} is supported with stride 1 only")
    rule = _rule(filters[0])
    params = rule.get("lr_params") or at(rule.where, {})
    ours: dict[str, Any] = {
        "maps": _same(filters, "nofm"),
        "kernels": [_side(layer) for layer in filters],
        "pool": _same_side(pools),
        "norm": _same_side(norms),
        "classes": classifier.get("nout"),
        "tied": _same(filters, "tied_weights"),
        "sparsity": _same(filters, "sparsity"),
        "pretraining": {
            "epochs": model.get("num_pretrain_epochs") if model.plain("pretraining", True) else 0,
            "lr": params.get("pretrain_learning_rate"),
        },
        "classifier_epochs": model.get("num_initial_epochs"),
        "classifier": _own(learning_rule(_rule(classifier)), learning_rule(rule)),
    }
    return at(model.where, ours), learning_rule(rule)


def _rule(layer: Said) -> Said:
    rule = next((found for key in RULE_KEYS if (found := layer.get(key)) is not None), None)
    if rule is None:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs a learning rule")
    return rule


def _own(theirs: Said, common: Said) -> Said | None:
    """Where the classifier learns otherwise than the filters."""
    apart = {key: value for key, value in theirs.items() if plain(value) != common.plain(key)}
    return at(theirs.where, apart) if apart else None


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


def _same_side(layers: list[Said]) -> Said:
    sides = [_side(layer) for layer in layers]
    if any(side.value != sides[0].value for side in sides):
        raise ExperimentError(f"{layers[-1].where}: fshape must be the same in all stacks of {layers[0].kind}")
    return sides[0]
