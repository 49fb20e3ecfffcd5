"""The shapes of samples from layer to layer, so that shapes that files computed by hand are checked."""

from __future__ import annotations

import math
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.neon.tagged_value import Said, at, plain

Shape = tuple[int, ...]
DATA = {
    "mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "iris": (4,), "housing": (13,),
    "sparsenet": (1, 16, 16), "ellipses": (3, 32, 32),
}  # fmt: skip


def whole(said: Said | None) -> int | None:
    """A count, or None: what is not one is refused later, by the option of ours that gets it."""
    value = said.value if said is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def of_data(dataset: Said) -> Shape | None:
    """The shape of a sample of a data set of ours; None if its files decide."""
    known = dataset.plain("shape") or DATA.get(dataset.plain("name"))
    if known is None and dataset.get("size") is not None:
        known = [dataset.plain("channels"), *dataset.plain("size")]
    return None if known is None or not all(isinstance(extent, int) for extent in known) else tuple(known)


def after_window(shape: Shape | None, window: dict[str, Any], maps: int | None) -> Shape | None:
    """The shape after a window has gone over an image; None if something is not known or wrong."""
    kernel, stride, padding = (plain(at("", window.get(key))) for key in ("kernel", "stride", "padding"))
    if shape is None or len(shape) < 2 or maps is None:
        return None
    dims = len(shape) - 1
    kernels = kernel if isinstance(kernel, list) else [kernel] * dims
    numbers = [*kernels, stride or 1, padding or 0]
    if len(kernels) != dims or not all(isinstance(n, int) and n >= 0 for n in numbers) or not stride:
        return None
    extents = tuple((e + 2 * numbers[-1] - k) // stride + 1 for e, k in zip(shape[1:], kernels, strict=True))
    return (maps, *extents) if min(extents) > 0 else None


def check_inputs(said: Said, shape: Shape | None, bias: bool = False) -> bool:
    """Compares what a layer says of its inputs with what they are.

    Args:
        said: the layer.
        shape: of a sample that comes in.
        bias: whether `nin` may count one input more, which was neon's bias in 2014.

    Returns:
        Whether it does.
    """
    counts_bias = False
    for key in ("nin", "nifm", "nfm", "ifmshape"):
        found = said.get(key)
        if found is None:
            continue
        if shape is None:
            raise ExperimentError(
                f"{found.where}: {said.kind}: {key} cannot be compared with the number of inputs, which is not known "
                "yet: leave it out"
            )
        expected: Any = math.prod(shape)
        if key != "nin":
            expected = list(shape[1:]) if key == "ifmshape" else shape[0]
        got = plain(found)
        if got == expected:
            continue
        counts_bias = key == "nin" and bias and got == expected + 1
        if not counts_bias:
            more = f", or {expected + 1} with neon's bias" if key == "nin" and bias else ""
            raise ExperimentError(
                f"{found.where}: {said.kind}: expected {key} to be {expected}{more}, got {str(got)[:60]}: its inputs "
                f"have shape {' x '.join(map(str, shape))}"
            )
    return counts_bias


def check_outputs(said: Said, key: str, expected: int | None) -> None:
    """Refuses a number of outputs that is not what comes out."""
    found = said.get(key)
    if found is not None and plain(found) != expected:
        raise ExperimentError(
            f"{found.where}: {said.kind}: expected {key} to be {expected}, got {str(plain(found))[:60]}"
        )


def check_data_layer(said: Said, shape: Shape | None) -> tuple[Shape | None, bool]:
    """Compares a DataLayer with the data.

    Returns:
        The shape in which the layers get a sample, and whether the data has another one, with as many values.
    """
    local = said.plain("is_local", False)
    keys = ("nofm", "ofmshape") if local else ("nout",)
    for key in ("nofm", "ofmshape", "nout"):
        found = said.get(key)
        if key in keys and found is None:
            raise ExperimentError(f"{said.where}: {said.kind} with is_local: {local} needs the key {key!r}")
        if key not in keys and found is not None and not (local and key == "nout"):
            raise ExperimentError(
                f"{found.where}: {said.kind}: {key} goes with is_local: True, and is_local is {local}"
            )
    said_shape = (said.plain("nofm"), *said.plain("ofmshape")) if local else (said.plain("nout"),)
    if local:
        check_outputs(said, "nout", math.prod(said_shape))
    if shape is not None and math.prod(shape) != math.prod(said_shape):
        key = keys[-1]
        found = said.get(key)
        assert found is not None
        raise ExperimentError(
            f"{found.where}: {said.kind}: expected {' and '.join(keys)} to be {_text(shape)}, as a sample of the data "
            f"has {math.prod(shape)} values, got {_text(said_shape)}"
        )
    if not local:  # a vector, of which a local layer makes a square image of one map
        return (shape if shape is not None and shape[0] == 1 else said_shape), False
    return said_shape, shape is not None and shape != said_shape


def square(shape: Shape) -> Shape | None:
    """The image that neon's local layers make of a vector: of one map, and square."""
    side = math.isqrt(shape[0])
    return (1, side, side) if side * side == shape[0] else None


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape))
