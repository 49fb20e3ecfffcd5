"""The optimizer of a neon experiment: the learning rule that most layers have, or that of the model."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.tagged_value import TaggedValue, as_float, at, plain
from torchmn.experiment.neon.layers import ConvertedLayers
from torchmn.experiment.neon.terms.rules import beside, momentum


def optimizer_of(converted: ConvertedLayers) -> TaggedValue:
    """Returns the most common learning rule of weights, and adds options to layers and biases with another one."""
    if not converted.rules:
        raise ExperimentError(f"{converted.layers[0].where}: no layer has weights to train")
    texts = [repr(plain(rules.weights)) for _, rules in converted.rules]
    common = converted.rules[texts.index(Counter(texts).most_common(1)[0][0])][1].weights
    for layer, rules in converted.rules:
        if plain(rules.weights) != plain(common):
            layer.value["optimizer"] = beside(rules.weights, common)
        if plain(rules.biases) != plain(rules.weights):
            layer.value["bias_optimizer"] = beside(rules.biases, common)
    return common


def rule_of_model(model: TaggedValue) -> TaggedValue | None:
    """Returns the default learning rule of the layers, which models had in 2014, or None."""
    rate = model.get("learning_rate")
    if rate is None:
        return None
    return at(rate.where, {"name": "sgd", "lr": as_float(rate), **momentum_of_model(model)})


def momentum_of_model(model: TaggedValue) -> dict[str, Any]:
    found = model.get("momentum") or model.get("momentum_params")
    return momentum(found) if found is not None else {}


def unused_rule(model: TaggedValue, converted: ConvertedLayers) -> list[str]:
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
