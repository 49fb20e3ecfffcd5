"""Converts neon's initial weights, activations, costs and metrics."""

from __future__ import annotations

import math
from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.tagged_value import TaggedValue, as_float, at, plain, same_object
from torchmn.experiment.neon.keys.tables import PLAIN_INITIALIZERS

ACTIVATIONS = {
    "Logistic": "logistic", "RectLin": "relu", "RectLeaky": "leaky_relu", "Tanh": "tanh", "Softmax": "softmax",
    "Linear": "identity",
}  # fmt: skip
COSTS = {"CrossEntropy": "cross_entropy", "SumSquaredDiffs": "sum_squared", "XCovariance": "cross_covariance"}
METRICS = {
    "MisclassRate": "misclassified", "MisclassPercentage": "misclassified_percentage",
    "MisclassSum": "misclassified_sum", "LogLossMean": "log_loss", "LogLossSum": "log_loss_sum", "AUC": "auc",
    "SSE": "sse", "MSE": "mse",
}  # fmt: skip
# neon's class: TorchMN's name, and neon's options with TorchMN's names for them.
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
WITH_ACTIVATION = ("FCLayer", "Layer", "LayerWithNoBias", "AELayer", "ConvLayer", "ActivationLayer")
"""Layers whose `activation` is applied to their outputs."""
# neon's default values.
DEFAULTS = {"uniform": {"low": 0.0, "high": 1.0}, "gaussian": {"std": 1.0}}
DEFAULT_INITIALIZER = {"name": "gaussian", "std": 0.01}
"""neon 0.9's initial weights for a layer without `weight_init`."""


def one_of(table: Any, tagged: TaggedValue, what: str) -> Any:
    """Returns the table's entry for the class of an object; raises an ExperimentError if there is none."""
    if tagged.name not in table:
        raise ExperimentError(
            f"{tagged.where}: {what} {tagged.kind or 'without !obj:'} is not supported. {nearest(tagged.name, table)}"
        )
    return table[tagged.name]


def cost_of(tagged: TaggedValue, batch_size: TaggedValue | None) -> TaggedValue:
    """Returns the converted cost, with its scale."""
    name = one_of(COSTS, tagged, "the cost")
    scale = tagged.number("scale", 1.0)
    options: dict[str, Any] = {"name": name}
    if name == "cross_covariance":
        if tagged.get("blkidx") is None:
            raise ExperimentError(f"{tagged.where}: {tagged.kind} needs the key 'blkidx'")
        options["split"] = tagged.get("blkidx")
        # neon divided it by the batch size, as it did sums over samples.
        scale /= float(batch_size.value) if batch_size is not None else 1.0
    if scale != 1.0:
        options["scale"] = scale
    return at(tagged.where, options if len(options) > 1 else name)


def check_cost(cost: TaggedValue, last: TaggedValue | None) -> None:
    """Compares a cost with the layer before it.

    Args:
        cost: neon's cost.
        last: neon's layer before it; None if unknown.

    Raises:
        ExperimentError: if `olayer` is another layer, or its outputs are not probabilities and the cost is
            CrossEntropy, of which neon takes logarithms.
    """
    if last is None:
        return
    found = cost.get("olayer")
    if found is not None and not same_object(found, last) and plain(found) != last.plain("name"):
        raise ExperimentError(
            f"{found.where}: {cost.kind}: expected olayer to be the layer before the cost, {last.kind} "
            f"{last.plain('name', '')}, got {found.kind or str(plain(found))[:60]}"
        )
    if cost.name == "CrossEntropy" and last.name in WITH_ACTIVATION:
        applied = last.get("activation")
        if applied is None or applied.name in ("Linear", "RectLin", "RectLeaky", "Tanh"):
            raise ExperimentError(
                f"{(applied or last).where}: {cost.kind}: expected the activation of {last.kind} before it to be "
                f"Logistic or Softmax, got {applied.kind if applied is not None else 'none'}: neon takes logarithms of "
                "its outputs"
            )


def activation(tagged: TaggedValue) -> TaggedValue | None:
    """Returns the converted activation; None for a linear one."""
    name = one_of(ACTIVATIONS, tagged, "the activation")
    if name == "leaky_relu" and tagged.get("slope") is not None:
        return at(tagged.where, {"name": name, "slope": tagged.number("slope")})
    return None if name == "identity" else at(tagged.where, name)


def initializer(
    tagged: TaggedValue, matrix: tuple[int, int] | None, fans: tuple[int, int] | None
) -> tuple[TaggedValue, float | None]:
    """Converts an initializer.

    Args:
        tagged: neon's initializer.
        matrix: shape of neon's weight matrix, on which some initializers depend; None if unknown.
        fans: fan-in and fan-out of TorchMN's layer; None if unknown.

    Returns:
        The initializer, and the initial value of the bias; None if neon's layer has no bias.
    """
    bias = tagged.number("bias_init") if tagged.get("bias_init") is not None else None
    if tagged.kind is None:  # before neon's release: {type: uniform, low: ..., high: ...}
        kind = tagged.string("type", "uniform")
        if kind not in PLAIN_INITIALIZERS:
            raise ExperimentError(
                f"{tagged.where}: the initial weights {kind!r} are not supported. {nearest(kind, PLAIN_INITIALIZERS)}"
            )
        name, renamed = INITIALIZERS[PLAIN_INITIALIZERS[kind]]
    else:
        name, renamed = one_of(INITIALIZERS, tagged, "the initial weights")
    if name == "identity":
        raise ExperimentError(f"{tagged.where}: the initial weights {tagged.kind} are not supported")
    options: dict[str, Any] = {"name": name, **DEFAULTS.get(name, {})}
    if tagged.plain("relu") and name == "orthonormal":
        options["scale"] = math.sqrt(2)
    for key, new_key in renamed.items():
        if (value := tagged.get(key)) is not None:
            options[new_key] = value if key == "sparseness" else as_float(value)
    if name == "auto_uniform":
        options = _auto_uniform(tagged, matrix, fans)
    elif name == "glorot" and (matrix is None or fans is None or sum(fans) != sum(matrix)):
        options = _uniform(tagged, matrix, tagged.number("scale", 1.0) * math.sqrt(6), sum(matrix or ()))
    return at(tagged.where, options), bias


def _auto_uniform(tagged: TaggedValue, matrix: tuple[int, int] | None, fans: tuple[int, int] | None) -> dict[str, Any]:
    """Returns a uniform initializer within 1 / sqrt(rows of neon's matrix) if it is local, else 1 / sqrt(columns)."""
    relu = tagged.plain("relu")
    scale = 1.0 if not relu else 2 ** (1 / 2 if relu is True else tagged.number("relu") / 2)
    local = any(tagged.plain(key) for key in ("is_local", "islocal"))
    if matrix is not None and fans is not None and matrix[0 if local else 1] == fans[0]:
        return {"name": "auto_uniform", **({"scale": scale} if scale != 1.0 else {})}
    return _uniform(tagged, matrix, scale, 0 if matrix is None else matrix[0 if local else 1])


def _uniform(tagged: TaggedValue, matrix: tuple[int, int] | None, scale: float, count: int) -> dict[str, Any]:
    if matrix is None:
        raise ExperimentError(
            f"{tagged.where}: {tagged.kind or 'the initial weights'}: they depend on the shape of the weights, which "
            "is unknown here: use UniformValGen with low and high"
        )
    bound = scale / math.sqrt(count)
    return {"name": "uniform", "low": -bound, "high": bound}
