"""Converts layers of images: convolutions, filters without shared weights, pooling and normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.tagged_value import TaggedValue, as_float, at, plain
from torchmn.experiment.neon.layers.converted import ConvertedLayers, add
from torchmn.experiment.neon.layers.weights import Counts, weights_of
from torchmn.experiment.neon.terms import shapes
from torchmn.experiment.neon.terms.shapes import Shape, check_inputs, check_outputs, positive_integer


def convolution(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Converts ConvLayer: a convolution, or with `local_conv` filters of each pixel."""
    _require_images(layer, converted)
    kind = "local" if layer.plain("local_conv") else "conv"
    maps, window = positive_integer(layer.get("nofm")), {**_window(layer), "padding": layer.get("pad")}
    shape = shapes.after_window(converted.shape, window, maps)
    fans = _window_fans(converted.shape, window, maps)
    inputs = fans[0]
    rows = None if inputs is None or shape is None else inputs * (math.prod(shape[1:]) if kind == "local" else 1)
    options, rule = weights_of(layer, converted, (rows, maps), fans)
    shared, found = bool(layer.plain("shared_bias", True)), layer.get("shared_bias")
    if options["bias"] and shared == (kind == "local"):
        raise ExperimentError(
            f"{(found or layer).where}: {layer.kind}: shared_bias: {shared} is not supported with local_conv: "
            f"{kind == 'local'}: a convolution has a bias per channel, and local filters one per pixel"
        )
    if found is not None and not options["bias"]:
        converted.notes.append(f"{found.where}: shared_bias has no effect: without bias_init there is no bias")
    add(converted, layer, kind, {"maps": layer.get("nofm"), **window, **options}, rule)
    converted.shape = shape


def local_filter(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Converts LocalFilteringLayer: filters of each pixel with norm 1."""
    _require_images(layer, converted)
    for key in ("sparsity", "tied_weights"):
        if (found := layer.get(key)) is not None and not converted.pretrained:
            converted.notes.append(f"{found.where}: {key} has no effect: only the model GB is pretrained")
    maps, window = positive_integer(layer.get("nofm")), _window(layer)
    shape = shapes.after_window(converted.shape, window, maps)
    fans = _window_fans(converted.shape, window, maps)
    options, rule = weights_of(layer, converted, (None if shape is None else math.prod(shape), fans[0]), fans)
    if options["bias"]:
        raise ExperimentError(f"{layer.where}: {layer.kind} has no bias: remove bias_init from its weight_init")
    add(converted, layer, "local", {"maps": layer.get("nofm"), **window, **options, "unit_norm": True}, rule)
    converted.shape = shape


def cross_map_pool(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Converts to a convolution with kernel 1, as in neon 0.9; its weights may become negative."""
    _require_images(layer, converted)
    maps, inputs = positive_integer(layer.get("nofm")), _maps(converted)
    options, rule = weights_of(layer, converted, (inputs, maps), (inputs, maps))
    if options["bias"]:
        raise ExperimentError(f"{layer.where}: {layer.kind} has no bias: remove bias_init from its weight_init")
    add(converted, layer, "conv", {"maps": layer.get("nofm"), "kernel": 1, **options}, rule)
    converted.shape = None if converted.shape is None or maps is None else (maps, *converted.shape[1:])


def pool(kind: str) -> Callable[[TaggedValue, ConvertedLayers], None]:
    """Returns the converter to one kind of pooling."""

    def convert(layer: TaggedValue, converted: ConvertedLayers) -> None:
        _require_images(layer, converted)
        check_outputs(layer, "nofm", _maps(converted))
        window = {**_window(layer), "padding": layer.get("pad")}
        shape = shapes.after_window(converted.shape, window, _maps(converted))
        if layer.plain("maxout", 1) != 1:
            shape = _maxout(layer, converted, kind, window, shape)
        else:
            add(converted, layer, kind, window)
        converted.shape = shape

    return convert


def pooling(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Converts PoolingLayer, which names the kind in `op`."""
    operations = {"max": "max_pool", "avg": "avg_pool", "l2": "l2_pool"}
    operation = layer.string("op", "max")
    if operation not in operations:
        raise ExperimentError(
            f"{layer.where}: pooling by {operation!r} is not supported. {nearest(operation, operations)}"
        )
    pool(operations[operation])(layer, converted)


def _maxout(
    layer: TaggedValue, converted: ConvertedLayers, kind: str, window: dict[str, Any], shape: Shape | None
) -> Shape:
    """Adds a maximum over windows and over each `maxout` maps in sequence: pooling of a volume of maps."""
    found = layer.get("maxout")
    assert found is not None
    count, before = positive_integer(found), converted.shape
    if kind != "max_pool":
        raise ExperimentError(f"{found.where}: {layer.kind}: maxout needs op: max: only maxima are taken over maps")
    if count is None or before is None or shape is None or before[0] % count:
        maps = "unknown" if before is None else before[0]
        raise ExperimentError(
            f"{found.where}: {layer.kind}: expected maxout to divide the number of maps, which is {maps}, got "
            f"{str(plain(found))[:60]}"
        )
    volume = {
        key: [first, *_per_side(window[key], len(before) - 1)]
        for key, first in (("kernel", count), ("stride", count), ("padding", 0))
    }
    after = (before[0] // count, *shape[1:])
    add(converted, layer, "reshape", {"shape": [1, *before]})
    add(converted, layer, kind, volume)
    add(converted, layer, "reshape", {"shape": list(after)})
    return after


def contrast_norm(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Converts contrast normalisation: before neon's release by a Gaussian window, later by the responses."""
    _require_images(layer, converted)
    check_outputs(layer, "nofm", _maps(converted))
    if layer.name == "LCNLayer":
        add(converted, layer, "lcn", {"kernel": _window(layer)["kernel"]})
    else:
        strength = {"alpha": number_of(layer, "alpha"), "beta": number_of(layer, "beta")}
        add(converted, layer, "lcn", {"kernel": layer.get("ksize"), "method": "response", **strength})


def response_norm(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Converts CrossMapResponseNormLayer."""
    _require_images(layer, converted)
    options = {"size": layer.get("ksize"), "alpha": number_of(layer, "alpha"), "beta": number_of(layer, "beta")}
    add(converted, layer, "response_norm", options)


def _window(layer: TaggedValue) -> dict[str, Any]:
    shape = layer.get("fshape")
    if shape is None:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs the key 'fshape'")
    sides = layer.plain("fshape")
    is_square = isinstance(sides, list) and len(set(map(str, sides))) == 1 and sides
    return {"kernel": at(shape.where, sides[0] if is_square else sides), "stride": layer.get("stride") or 1}


def _window_fans(shape: Shape | None, window: dict[str, Any], maps: int | None) -> Counts:
    kernel = plain(window["kernel"])
    sides = kernel if isinstance(kernel, list) else [kernel] * (len(shape or ()) - 1)
    if shape is None or not all(isinstance(side, int) for side in sides):
        return None, None
    return shape[0] * math.prod(sides), None if maps is None else maps * math.prod(sides)


def _per_side(value: TaggedValue | int | None, sides: int) -> list[int]:
    number = plain(value) if isinstance(value, TaggedValue) else value
    return number if isinstance(number, list) else [number or 0] * sides


def _require_images(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Checks the inputs of a local layer; as in neon, a vector is reshaped to a square image with one channel."""
    if converted.shape is not None and len(converted.shape) == 1:
        image = shapes.square(converted.shape)
        if image is None:
            raise ExperimentError(
                f"{layer.where}: {layer.kind} needs images, got vectors of {converted.shape[0]} values, which are not "
                "a square image with one channel: set is_local, nofm and ofmshape in DataLayer"
            )
        add(converted, layer, "reshape", {"shape": list(image)})
        converted.shape = image
    check_inputs(layer, converted.shape)


def _maps(converted: ConvertedLayers) -> int | None:
    return None if converted.shape is None else converted.shape[0]


def number_of(layer: TaggedValue, key: str) -> TaggedValue:
    found = layer.get(key)
    if found is None:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs the key {key!r}")
    return as_float(found)
