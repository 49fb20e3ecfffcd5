"""neon's learning rules, in our words."""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.neon.keys import rule_type
from torchmn.experiment.neon.tables import MOMENTA, RULES
from torchmn.experiment.neon.tagged_value import Said, at, number_of

RENAMED = {"learning_rate": "lr", "weight_decay": "weight_decay", "rho": "rho", "epsilon": "eps", "gamma": "alpha"}
# What neon took where a file says nothing.
DEFAULTS = {"adadelta": {"rho": 0.95, "eps": 1e-6}, "rmsprop": {"alpha": 0.9, "eps": 1e-6}}
DEFAULT = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
"""The rule of a layer without one, in neon 0.9."""


def learning_rule(said: Said) -> Said:
    """Our optimizer for a learning rule: {type: ..., lr_params: {...}}, or an object of the rule's class."""
    kind = rule_type(said)
    if kind not in RULES:
        raise ExperimentError(f"{said.where}: the learning rule {kind!r} is not supported. {nearest(kind, RULES)}")
    params = said.get("lr_params") or at(said.where, {})
    if "learning_rate" in RULES[kind] and params.get("learning_rate") is None:
        raise ExperimentError(f"{params.where}: {kind} needs the key 'learning_rate'")
    ours: dict[str, Any] = DEFAULTS.get(kind, {}) | {"name": kind if kind in DEFAULTS else "sgd"}
    for key in RULES[kind]:
        value = params.get(key)
        if value is None:
            continue
        if key in RENAMED:
            ours[RENAMED[key]] = number_of(value)
        elif key == "momentum_params":
            ours.update(momentum(value))
        elif key == "schedule":
            ours["schedule"] = _schedule(value)
    return at(said.where, ours)


def momentum(said: Said) -> dict[str, Any]:
    """Our momentum for neon's: {type: constant, coef: ...}, or one that changes from epoch to epoch."""
    kind = said.word("type", "constant")
    if kind not in MOMENTA:
        raise ExperimentError(f"{said.where}: the momentum {kind!r} is not supported. {nearest(kind, MOMENTA)}")
    order = ("initial_coef", "coef") if kind == "linear_monotone" else ("coef", "initial_coef")
    first = next((key for key in order if said.get(key) is not None), "coef")
    coefficient = said.number(first)
    if kind == "constant":
        return {"momentum": at(said.where, coefficient)}
    if kind == "nesterov":
        return {"momentum": at(said.where, coefficient), "nesterov": coefficient > 0}
    if said.get("start_epoch") is None or said.get("saturate_epoch") is None:
        return {"momentum": at(said.where, coefficient)}  # without both, neon stays at the first
    last = said.number("saturated_coef", said.number("coef", 0.0))
    start, end = said.plain("start_epoch"), said.plain("saturate_epoch")
    if start == end:  # at once, in this epoch
        if end == 0:
            return {"momentum": at(said.where, last)}
        start = end - 1 if isinstance(end, int) else start
    return {"momentum": at(said.where, {"from": coefficient, "to": last, "start": start, "end": end})}


def _schedule(said: Said) -> Said:
    if said.plain("type", "step") != "step":
        raise ExperimentError(f"{said.where}: the schedule {said.plain('type')!r} is not supported, only `step` is")
    for key in ("step_epochs", "ratio"):
        if said.get(key) is None:
            raise ExperimentError(f"{said.where}: the schedule needs the key {key!r}")
    epochs, ratio = said.plain("step_epochs"), said.get("ratio")
    assert ratio is not None
    key = "step" if isinstance(epochs, list) else "every"
    # neon counted the epochs from 1 here.
    return at(said.where, {key: epochs, "ratio": number_of(ratio), "shift": 1})
