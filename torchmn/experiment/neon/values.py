"""neon's initial weights, activations, costs and metrics, in our words."""

from __future__ import annotations

import math
from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.neon.tables import PLAIN_INITIALIZERS
from torchmn.experiment.neon.tagged_value import Said, at, number_of

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
# What neon took where a file says nothing.
DEFAULTS = {"uniform": {"low": 0.0, "high": 1.0}, "gaussian": {"std": 1.0}}
DEFAULT_INITIALIZER = {"name": "gaussian", "std": 0.01}
"""The initial weights of a layer without any, in neon 0.9."""


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


def initializer(said: Said, matrix: tuple[int, int] | None, fans: tuple[int, int] | None) -> tuple[Said, float | None]:
    """Our initializer, and with what a bias begins: without it, neon's layers have none.

    Args:
        said: neon's.
        matrix: the shape that neon's weights have, which some initializers follow; None if it is not known.
        fans: of how many values an output is made, and into how many each goes, as our initializers count.
    """
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
    chosen: dict[str, Any] = {"name": ours, **DEFAULTS.get(ours, {})}
    if said.plain("relu") and ours == "orthonormal":
        chosen["scale"] = math.sqrt(2)
    for key, name in options.items():
        if (value := said.get(key)) is not None:
            chosen[name] = value if key == "sparseness" else number_of(value)
    if ours == "auto_uniform":
        chosen = _auto_uniform(said, matrix, fans)
    elif ours == "glorot" and (matrix is None or fans is None or sum(fans) != sum(matrix)):
        chosen = _uniform(said, matrix, said.number("scale", 1.0) * math.sqrt(6), sum(matrix or ()))
    return at(said.where, chosen), bias


def _auto_uniform(said: Said, matrix: tuple[int, int] | None, fans: tuple[int, int] | None) -> dict[str, Any]:
    """Within one over the root of the rows of neon's matrix if it is called local, otherwise of its columns."""
    relu = said.plain("relu")
    scale = 1.0 if not relu else 2 ** (1 / 2 if relu is True else said.number("relu") / 2)
    local = any(said.plain(key) for key in ("is_local", "islocal"))
    if matrix is not None and fans is not None and matrix[0 if local else 1] == fans[0]:
        return {"name": "auto_uniform", **({"scale": scale} if scale != 1.0 else {})}
    return _uniform(said, matrix, scale, 0 if matrix is None else matrix[0 if local else 1])


def _uniform(said: Said, matrix: tuple[int, int] | None, scale: float, count: int) -> dict[str, Any]:
    if matrix is None:
        raise ExperimentError(
            f"{said.where}: {said.kind or 'the initial weights'}: the shape of the weights, which they follow, is not "
            "known here: use UniformValGen with low and high"
        )
    bound = scale / math.sqrt(count)
    return {"name": "uniform", "low": -bound, "high": bound}
