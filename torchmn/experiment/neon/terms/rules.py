"""Converts neon's learning rules to optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.tagged_value import TaggedValue, as_float, at, plain
from torchmn.experiment.neon.keys.rule_types import rule_type
from torchmn.experiment.neon.keys.tables import MOMENTA, RULES

RENAMED = {"learning_rate": "lr", "weight_decay": "weight_decay", "rho": "rho", "epsilon": "eps", "gamma": "alpha"}
# neon's default values.
DEFAULTS = {"adadelta": {"rho": 0.95, "eps": 1e-6}, "rmsprop": {"alpha": 0.9, "eps": 1e-6}}
DEFAULT = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
"""neon 0.9's learning rule for a layer without one."""


def learning_rule(rule: TaggedValue) -> TaggedValue:
    """Returns the optimizer for a learning rule, `{type: ..., lr_params: {...}}` or an object of the rule's class."""
    kind = rule_type(rule)
    if kind not in RULES:
        raise ExperimentError(f"{rule.where}: the learning rule {kind!r} is not supported. {nearest(kind, RULES)}")
    params = rule.get("lr_params") or at(rule.where, {})
    if "learning_rate" in RULES[kind] and params.get("learning_rate") is None:
        raise ExperimentError(f"{params.where}: {kind} needs the key 'learning_rate'")
    options: dict[str, Any] = DEFAULTS.get(kind, {}) | {"name": kind if kind in DEFAULTS else "sgd"}
    for key in RULES[kind]:
        value = params.get(key)
        if value is None:
            continue
        if key in RENAMED:
            options[RENAMED[key]] = as_float(value)
        elif key == "momentum_params":
            options.update(momentum(value))
        elif key == "schedule":
            options["schedule"] = _schedule(value)
    return at(rule.where, options)


@dataclass(frozen=True)
class LayerRules:
    """The optimizers of a layer's weights and biases."""

    weights: TaggedValue
    biases: TaggedValue


def beside(rule: TaggedValue, common: TaggedValue) -> TaggedValue:
    """Returns the value of a layer's option `optimizer` for a rule, in an experiment with the optimizer `common`.

    That is the options that differ, if a layer can set them, or else the whole rule.
    """
    options, default = plain(rule), plain(common)
    different = {key for key in options.keys() | default.keys() if options.get(key) != default.get(key)}
    if different - {"lr", "momentum", "weight_decay"}:
        return rule
    given = {key: value for key, value in options.items() if key in different}
    return at(rule.where, given | dict.fromkeys(different - given.keys(), 0.0))


def momentum(params: TaggedValue) -> dict[str, Any]:
    """Returns the options of momentum for neon's `{type: constant, coef: ...}` or one that depends on the epoch."""
    kind = params.string("type", "constant")
    if kind not in MOMENTA:
        raise ExperimentError(f"{params.where}: the momentum {kind!r} is not supported. {nearest(kind, MOMENTA)}")
    order = ("initial_coef", "coef") if kind == "linear_monotone" else ("coef", "initial_coef")
    first = next((key for key in order if params.get(key) is not None), "coef")
    coefficient = params.number(first)
    if kind == "constant":
        return {"momentum": at(params.where, coefficient)}
    if kind == "nesterov":
        return {"momentum": at(params.where, coefficient), "nesterov": coefficient > 0}
    if params.get("start_epoch") is None or params.get("saturate_epoch") is None:
        return {"momentum": at(params.where, coefficient)}  # without both, neon keeps the initial value
    last = params.number("saturated_coef", params.number("coef", 0.0))
    start, end = params.plain("start_epoch"), params.plain("saturate_epoch")
    if start == end:  # a jump in this epoch
        if end == 0:
            return {"momentum": at(params.where, last)}
        start = end - 1 if isinstance(end, int) else start
    return {"momentum": at(params.where, {"from": coefficient, "to": last, "start": start, "end": end})}


def _schedule(schedule: TaggedValue) -> TaggedValue:
    if schedule.plain("type", "step") != "step":
        raise ExperimentError(
            f"{schedule.where}: the schedule {schedule.plain('type')!r} is not supported, only `step` is"
        )
    for key in ("step_epochs", "ratio"):
        if schedule.get(key) is None:
            raise ExperimentError(f"{schedule.where}: the schedule needs the key {key!r}")
    epochs, ratio = schedule.plain("step_epochs"), schedule.get("ratio")
    assert ratio is not None
    key = "step" if isinstance(epochs, list) else "every"
    # neon counts epochs from 1 here.
    return at(schedule.where, {key: epochs, "ratio": as_float(ratio), "shift": 1})
