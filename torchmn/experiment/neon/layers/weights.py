"""The options that layers with weights have in common: initial weights, activation, and learning rules."""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.tagged_value import TaggedValue, as_float, at
from torchmn.experiment.neon.keys.rule_types import rule_type
from torchmn.experiment.neon.layers.converted import ConvertedLayers
from torchmn.experiment.neon.terms.rules import DEFAULT, LayerRules, learning_rule
from torchmn.experiment.neon.terms.values import DEFAULT_INITIALIZER, activation, initializer

RULE_KEYS = ("learning_rule", "lrule_init")

NOT_FOR_BIAS = ("glorot", "auto_uniform", "sparse_eigen", "orthonormal")

Counts = tuple[int | None, int | None]


def rule_of(layer: TaggedValue) -> TaggedValue | None:
    """Returns the learning rule of a layer, not converted, or None."""
    found = [rule for key in RULE_KEYS if (rule := layer.get(key)) is not None]
    if len(found) == 2:
        raise ExperimentError(
            f"{found[1].where}: {layer.kind} has both learning_rule and lrule_init: expected one of them"
        )
    return found[0] if found else None


def weights_of(
    layer: TaggedValue, converted: ConvertedLayers, matrix: Counts, fans: Counts, bias: bool = False
) -> tuple[dict[str, Any], LayerRules]:
    """Returns the options that layers with weights have in common, and the layer's optimizers.

    Args:
        layer: the layer.
        converted: the layers so far.
        matrix: shape of neon's weight matrix.
        fans: fan-in and fan-out of the converted layer.
        bias: whether neon counts a bias among the inputs.
    """
    options = _initial_weights(layer, matrix, fans, bias)
    if (found := layer.get("activation")) is not None:
        options["activation"] = activation(found)
    if layer.plain("batch_norm") and layer.name != "CrossMapPoolingLayer":
        options["batch_norm"] = True
    optimizer = _optimizer(layer, converted)
    return options, LayerRules(optimizer, _bias_optimizer(layer, converted, options["bias"]) or optimizer)


def _both(counts: Counts) -> tuple[int, int] | None:
    first, second = counts
    return None if first is None or second is None else (first, second)


def _initial_weights(layer: TaggedValue, matrix: Counts, fans: Counts, bias: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"bias": bias}
    bias_init: float | None = None
    if (found := layer.get("weight_init")) is not None:
        options["init"], bias_init = initializer(found, _both(matrix), _both(fans))
    else:
        options["init"] = at(layer.where, DEFAULT_INITIALIZER)
    if bias_init is not None:
        options |= {"bias": True, "bias_init": bias_init}
    elif bias:  # in neon one more column of the weights
        name = options["init"].plain("name")
        if name in NOT_FOR_BIAS:
            raise ExperimentError(
                f"{layer.where}: {layer.kind}: nin counts neon's bias, for which the initial values {name} are not "
                "supported: set bias_init in weight_init"
            )
        options["bias_init"] = "init"
    return options


def _optimizer(layer: TaggedValue, converted: ConvertedLayers) -> TaggedValue:
    """Returns the optimizer of a layer: of its learning rule, else with its learning rate, else the default one."""
    rule, rate = rule_of(layer), layer.get("learning_rate")
    if rule is None and rate is not None:
        converted.used |= {"rate", "momentum"}
        return at(rate.where, {"name": "sgd", "lr": as_float(rate), **converted.momentum})
    if rule is None:
        converted.used |= {"learning_rate", "momentum"}
        return converted.default_rule or at(layer.where, DEFAULT)
    if rate is not None:
        converted.notes.append(f"{rate.where}: learning_rate has no effect: the layer has a learning rule")
    if rule_type(rule) == "gradient_descent_pretrain" and not converted.pretrained:
        where = (rule.get("lr_params") or rule).where
        converted.notes.append(f"{where}: pretrain_learning_rate has no effect: only the model GB is pretrained")
    return learning_rule(rule)


def _bias_optimizer(layer: TaggedValue, converted: ConvertedLayers, has_bias: bool) -> TaggedValue | None:
    """Returns the optimizer of a layer's biases, if it has a learning rule for them."""
    found = layer.get("brule_init")
    if found is None or layer.name in ("CrossMapPoolingLayer", "LocalFilteringLayer"):
        return None
    if not has_bias:
        converted.notes.append(f"{found.where}: brule_init has no effect: without bias_init there is no bias")
        return None
    return learning_rule(found)
