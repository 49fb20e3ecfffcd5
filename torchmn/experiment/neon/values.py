"""neon's initial weights, activations, costs, metrics and learning rules, in our words."""

from __future__ import annotations

from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.neon.said import Said, at

ACTIVATIONS = {
    "Logistic": "logistic", "RectLin": "relu", "RectLeaky": "leaky_relu", "Tanh": "tanh", "Softmax": "softmax",
    "Linear": "identity",
}  # fmt: skip
COSTS = {"CrossEntropy": "cross_entropy", "SumSquaredDiffs": "sum_squared", "XCovariance": "cross_covariance"}
COST_KEYS = ("scale", "epsilon", "blkidx", "shortcut_deriv", "backend_type", "backend", "temp_dtype")
METRICS = {
    "MisclassRate": "misclassified", "MisclassPercentage": "misclassified_percentage",
    "MisclassSum": "misclassified_sum", "LogLossMean": "log_loss", "LogLossSum": "log_loss_sum", "AUC": "auc",
    "SSE": "sse", "MSE": "mse",
}  # fmt: skip
# Our name, and the names of the options: theirs -> ours.
INITIALIZERS: dict[str, tuple[str, dict[str, str]]] = {
    "UniformValGen": ("uniform", {"low": "low", "high": "high"}),
    "AutoUniformValGen": ("auto_uniform", {}),
    "GaussianValGen": ("gaussian", {"loc": "mean", "scale": "std"}),
    "NormalValGen": ("gaussian", {"loc": "mean", "scale": "std"}),
    "NodeNormalizedValGen": ("glorot", {"scale": "scale"}),
    "SparseEigenValGen": ("sparse_eigen", {"sparseness": "sparseness", "eigenvalue": "eigenvalue"}),
    "OrthoNormalizedValGen": ("orthonormal", {}),
    "IdentityValGen": ("identity", {}),
}
PLAIN_INITIALIZERS = {"uniform": "UniformValGen", "gaussian": "GaussianValGen", "normal": "GaussianValGen",
                      "node_normalized": "NodeNormalizedValGen", "sparse_eigenval": "SparseEigenValGen"}  # fmt: skip
# What neon took where a file says nothing.
DEFAULTS = {"uniform": {"low": 0.0, "high": 1.0}, "gaussian": {"std": 1.0}}
IGNORED_OF_INITIALIZERS = ("type", "bias_init", "backend", "relu", "islocal", "name")


def one_of(table: Any, said: Said, what: str) -> Any:
    """What the class of an object means; an ExperimentError with the nearest name if it is not in the table."""
    if said.name not in table:
        raise ExperimentError(
            f"{said.where}: {what} {said.kind or 'without !obj:'} is not supported. {nearest(said.name, table)}"
        )
    return table[said.name]


def cost_of(said: Said, batch_size: Said | None) -> Said:
    """Our cost, with its scale."""
    name = one_of(COSTS, said, "the cost")
    for key, value in said.items():
        if key not in COST_KEYS:
            raise ExperimentError(
                f"{value.where}: {said.kind} has no key {key!r} that is known here. {nearest(key, COST_KEYS)}"
            )
    shortcut = said.get("shortcut_deriv")
    if name == "cross_entropy" and shortcut is not None and shortcut.value is not True:
        raise ExperimentError(
            f"{shortcut.where}: shortcut_deriv: False is not supported: the derivative of a cost and of the "
            "softmax or logistic before it is taken in one step, as y - t, which is the same and does not vanish where "
            "outputs round to 0 or 1. Leave the key out"
        )
    scale = said.number("scale", 1.0)
    ours: dict[str, Any] = {"name": name}
    if name == "cross_covariance":
        if said.get("blkidx") is None:
            raise ExperimentError(f"{said.where}: {said.kind} needs the key 'blkidx'")
        ours["split"] = said.get("blkidx")
        # neon divided it by the batch, as it did a sum over samples.
        scale /= float(batch_size.value) if batch_size is not None else 1.0
    if scale != 1.0:
        ours["scale"] = scale
    return at(said.where, ours if len(ours) > 1 else name)


def activation(said: Said) -> Said | None:
    """Our activation; None for a linear one."""
    name = one_of(ACTIVATIONS, said, "the activation")
    if name == "leaky_relu" and said.get("slope") is not None:
        return at(said.where, {"name": name, "slope": said.number("slope")})
    return None if name == "identity" else at(said.where, name)


def initializer(said: Said) -> tuple[Said, float | None]:
    """Our initializer, and with what a bias begins: without it, neon's layers have none."""
    bias = said.number("bias_init") if said.get("bias_init") is not None else None
    if said.kind is None:  # pre-release: {type: uniform, low: ..., high: ...}
        kind = said.word("type", "uniform")
        if kind not in PLAIN_INITIALIZERS:
            raise ExperimentError(
                f"{said.where}: the initial weights {kind!r} are not supported. {nearest(kind, PLAIN_INITIALIZERS)}"
            )
        ours, options = INITIALIZERS[PLAIN_INITIALIZERS[kind]]
    else:
        ours, options = one_of(INITIALIZERS, said, "the initial weights")
    if ours == "identity":
        raise ExperimentError(f"{said.where}: the initial weights {said.kind} are not supported")
    chosen: dict[str, Any] = {"name": ours, **(DEFAULTS.get(ours, {}) if said.kind else {})}
    if said.plain("relu") and ours in ("auto_uniform", "orthonormal"):
        chosen["scale"] = 2 ** (1 / 2 if said.plain("relu") is True else int(said.number("relu")) / 2)
    for key, value in said.items():
        if key in options:
            chosen[options[key]] = value if not isinstance(value.value, int) else Said(float(value.value), value.where)
        elif key not in IGNORED_OF_INITIALIZERS:
            raise ExperimentError(
                f"{value.where}: {said.kind or 'the initial weights'} has no key {key!r} that is known here"
            )
    return at(said.where, chosen), bias


# Learning rules --------------------------------------------------------------------------------------------------

SGD_RULES = ("gradient_descent", "gradient_descent_pretrain", "gradient_descent_momentum",
             "gradient_descent_momentum_weight_decay")  # fmt: skip
MOMENTA = ("constant", "linear_monotone", "nesterov")
RULES = (*SGD_RULES, "adadelta", "rmsprop")
KNOWN = ("learning_rate", "pretrain_learning_rate", "weight_decay", "momentum_params", "schedule", "rho", "epsilon",
         "gamma", "backend", "decay")  # fmt: skip


def learning_rule(said: Said) -> Said:
    """Our optimizer for a learning rule: {type: ..., lr_params: {...}}."""
    kind = said.word("type")
    if kind not in RULES:
        raise ExperimentError(f"{said.where}: the learning rule {kind!r} is not supported. {nearest(kind, RULES)}")
    params = said.get("lr_params") or at(said.where, {})
    for key, value in params.items():
        if key not in KNOWN:
            raise ExperimentError(
                f"{value.where}: lr_params has no key {key!r} that is known here. {nearest(key, KNOWN)}"
            )
    if kind != "adadelta" and params.get("learning_rate") is None:
        raise ExperimentError(f"{params.where}: {kind} needs the key 'learning_rate'")
    ours: dict[str, Any] = {"name": kind if kind in ("adadelta", "rmsprop") else "sgd"}
    renamed = {"learning_rate": "lr", "weight_decay": "weight_decay", "rho": "rho", "epsilon": "eps", "gamma": "alpha"}
    for key, name in renamed.items():
        if (value := params.get(key)) is not None:
            ours[name] = Said(float(value.value) if isinstance(value.value, int) else value.value, value.where)
    if kind == "rmsprop":
        ours = {"alpha": 0.9, "eps": 1e-6, **ours}
    if (momentum := params.get("momentum_params")) is not None and kind != "adadelta":
        ours.update(_momentum(momentum))
    if (schedule := params.get("schedule")) is not None:
        ours["schedule"] = _schedule(schedule)
    return at(said.where, ours)


def _momentum(said: Said) -> dict[str, Any]:
    kind = said.word("type", "constant")
    coefficient = said.number("initial_coef" if said.get("coef") is None and said.get("initial_coef") else "coef")
    if kind == "constant":
        return {"momentum": at(said.where, coefficient)}
    if kind == "nesterov":
        return {"momentum": at(said.where, coefficient), "nesterov": coefficient > 0}
    if kind == "linear_monotone":
        ramp = {
            "from": coefficient, "to": said.number("saturated_coef", coefficient),
            "start": said.plain("start_epoch", 0), "end": said.plain("saturate_epoch", 1),
        }  # fmt: skip
        return {"momentum": at(said.where, ramp)}
    raise ExperimentError(f"{said.where}: the momentum {kind!r} is not supported. {nearest(kind, MOMENTA)}")


def _schedule(said: Said) -> Said:
    if said.plain("type", "step") != "step":
        raise ExperimentError(f"{said.where}: the schedule {said.plain('type')!r} is not supported, only `step` is")
    epochs = said.plain("step_epochs")
    ratio = said.plain("ratio", 0.1)
    key = "step" if isinstance(epochs, list) else "every"
    # neon counted the epochs from 1 here.
    return at(said.where, {key: epochs, "ratio": float(ratio) if isinstance(ratio, int) else ratio, "shift": 1})
