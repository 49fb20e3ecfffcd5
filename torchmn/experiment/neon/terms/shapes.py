"""Computes the shape of a sample after each layer, and checks the shapes that neon's files state."""

from __future__ import annotations

import math
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.tagged_value import TaggedValue, at, plain

Shape = tuple[int, ...]
DATA = {
    "mnist": (1, 28, 28), "cifar10": (3, 32, 32), "cifar100": (3, 32, 32), "iris": (4,), "housing": (13,),
    "sparsenet": (1, 16, 16), "ellipses": (3, 32, 32),
}  # fmt: skip


def positive_integer(tagged: TaggedValue | None) -> int | None:
    """Returns a positive integer, or None; other values raise an error later, in the option that receives them."""
    value = tagged.value if tagged is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def sample_shape(dataset: TaggedValue) -> Shape | None:
    """Returns the shape of a sample of a converted data set; None if it depends on the files."""
    shape = dataset.plain("shape") or DATA.get(dataset.plain("name"))
    if shape is None and dataset.get("size") is not None:
        shape = [dataset.plain("channels"), *dataset.plain("size")]
    return None if shape is None or not all(isinstance(extent, int) for extent in shape) else tuple(shape)


def after_window(shape: Shape | None, window: dict[str, Any], maps: int | None) -> Shape | None:
    """Returns the shape after a convolution or pooling; None if something is unknown or invalid."""
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


def check_inputs(layer: TaggedValue, shape: Shape | None, bias: bool = False) -> bool:
    """Compares the keys of a layer about its inputs with their actual shape.

    Args:
        layer: the layer.
        shape: of an input.
        bias: whether `nin` may be one larger, for neon's bias of 2014.

    Returns:
        Whether `nin` counts the bias.

    Raises:
        ExperimentError: if a key differs from the shape.
    """
    counts_bias = False
    for key in ("nin", "nifm", "nfm", "ifmshape"):
        found = layer.get(key)
        if found is None:
            continue
        if shape is None:
            raise ExperimentError(
                f"{found.where}: {layer.kind}: {key} cannot be compared with the shape of the inputs, which is unknown "
                "here: remove it"
            )
        expected: Any = math.prod(shape)
        if key != "nin":
            expected = list(shape[1:]) if key == "ifmshape" else shape[0]
        got = plain(found)
        if got == expected:
            continue
        counts_bias = key == "nin" and bias and got == expected + 1
        if not counts_bias:
            with_bias = f", or {expected + 1} with neon's bias" if key == "nin" and bias else ""
            raise ExperimentError(
                f"{found.where}: {layer.kind}: expected {key} to be {expected}{with_bias}, got {str(got)[:60]}: its "
                f"inputs have shape {_text(shape)}"
            )
    return counts_bias


def check_outputs(layer: TaggedValue, key: str, expected: int | None) -> None:
    """Raises an ExperimentError if a key differs from the actual number of outputs."""
    found = layer.get(key)
    if found is not None and plain(found) != expected:
        raise ExperimentError(
            f"{found.where}: {layer.kind}: expected {key} to be {expected}, got {str(plain(found))[:60]}"
        )


def check_data_layer(layer: TaggedValue, shape: Shape | None) -> tuple[Shape | None, bool]:
    """Compares a DataLayer with the shape of a sample.

    Returns:
        The shape of a sample for the layers, and whether samples must be reshaped to it.

    Raises:
        ExperimentError: if the number of values differs.
    """
    local = layer.plain("is_local", False)
    if not local and layer.get("nout") is None and layer.get("dataset") is not None and shape is not None:
        return (shape if shape[0] == 1 else (math.prod(shape),)), False  # neon takes it from the data set
    keys = ("nofm", "ofmshape") if local else ("nout",)
    for key in ("nofm", "ofmshape", "nout"):
        found = layer.get(key)
        if key in keys and found is None:
            raise ExperimentError(f"{layer.where}: {layer.kind} with is_local: {local} needs the key {key!r}")
        if key not in keys and found is not None and not (local and key == "nout"):
            raise ExperimentError(
                f"{found.where}: {layer.kind}: {key} requires is_local: True, and is_local is {local}"
            )
    stated_shape = (layer.plain("nofm"), *layer.plain("ofmshape")) if local else (layer.plain("nout"),)
    if local:
        check_outputs(layer, "nout", math.prod(stated_shape))
    if shape is not None and math.prod(shape) != math.prod(stated_shape):
        key = keys[-1]
        found = layer.get(key)
        assert found is not None
        raise ExperimentError(
            f"{found.where}: {layer.kind}: expected {' and '.join(keys)} to be {_text(shape)}, as a sample of the data "
            f"has {math.prod(shape)} values, got {_text(stated_shape)}"
        )
    if not local:  # a vector; a local layer would make a square image with one channel of it
        return (shape if shape is not None and shape[0] == 1 else stated_shape), False
    return stated_shape, shape is not None and shape != stated_shape


def square(shape: Shape) -> Shape | None:
    """Returns the shape of the square image with one channel that neon's local layers make of a vector, or None."""
    side = math.isqrt(shape[0])
    return (1, side, side) if side * side == shape[0] else None


def _text(shape: Shape) -> str:
    return " x ".join(map(str, shape))
