"""Converts neon's layers. Shapes are computed from layer to layer, and those that a file states are checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.neon import shapes
from torchmn.experiment.neon.keys import rule_type
from torchmn.experiment.neon.rules import DEFAULT, learning_rule
from torchmn.experiment.neon.shapes import Shape, check_inputs, check_outputs, positive_integer
from torchmn.experiment.neon.tagged_value import TaggedValue, as_float, at, plain
from torchmn.experiment.neon.values import (
    DEFAULT_INITIALIZER,
    activation,
    check_olayer,
    cost_of,
    initializer,
    one_of,
)

RULE_KEYS = ("learning_rule", "lrule_init")
NOT_FOR_BIAS = ("glorot", "auto_uniform", "sparse_eigen", "orthonormal")


@dataclass
class ConvertedLayers:
    """The result of converting a list of layers.

    Attributes:
        layers: converted layers.
        rules: the options of each layer with weights, and its optimizer.
        last: neon's layer before the cost.
        cost: of a CostLayer.
        target: "labels" or "inputs".
        notes: a line for each key without effect.
        batch_size: of the model.
        default_rule: optimizer of layers without a learning rule.
        momentum: the model's options of momentum, for layers with a learning rate and no learning rule.
        used: keys of the model that optimizers have used.
        shape: of a sample after the last layer so far; None if unknown.
        pretrained: whether the model is pretrained.
    """

    layers: list[TaggedValue] = field(default_factory=list)
    rules: list[tuple[TaggedValue, TaggedValue]] = field(default_factory=list)
    last: TaggedValue | None = None
    cost: TaggedValue | None = None
    target: str = "labels"
    notes: list[str] = field(default_factory=list)
    batch_size: TaggedValue | None = None
    default_rule: TaggedValue | None = None
    momentum: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    shape: Shape | None = None
    pretrained: bool = False

    def inside(self) -> ConvertedLayers:
        """Returns an empty result for layers inside another layer, with the same model and inputs."""
        return replace(self, layers=[], rules=[], notes=[])

    def include(self, inner: ConvertedLayers) -> None:
        """Adds the optimizers and notes of layers inside another layer."""
        self.rules += inner.rules
        self.notes += inner.notes


def convert_layers(layers: TaggedValue, converted: ConvertedLayers, inner: bool = False) -> ConvertedLayers:
    """Converts the layers of a model, or of a branch of it.

    Args:
        layers: a list of neon's layers.
        converted: receives them; its shape is that of their inputs.
        inner: whether they are inside another layer; only there the result may be empty.

    Returns:
        `converted`.
    """
    if not isinstance(layers.value, list):
        raise ExperimentError(f"{layers.where}: expected layers to be a list")
    for layer in layers.value:
        convert = one_of(LAYERS, layer, "the layer")
        check_batch_size(layer, converted)
        convert(layer, converted)
        converted.last = layer
    if not inner and not converted.layers:
        raise ExperimentError(f"{layers.where}: there are no layers between data and cost")
    return converted


def check_batch_size(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Raises an ExperimentError if a layer has another batch size than the model."""
    found, expected = layer.get("batch_size"), converted.batch_size
    if found is not None and expected is not None and plain(found) != plain(expected):
        raise ExperimentError(
            f"{found.where}: {layer.kind}: expected batch_size to be that of the model, {plain(expected)}, got "
            f"{plain(found)}"
        )


def _add(
    converted: ConvertedLayers, layer: TaggedValue, kind: str, options: dict[str, Any], rule: TaggedValue | None = None
) -> None:
    new = at(layer.where, options)
    converted.layers.append(at(layer.where, {kind: new}))
    if rule is not None:
        converted.rules.append((new, rule))


def rule_of(layer: TaggedValue) -> TaggedValue | None:
    """Returns the learning rule of a layer, not converted, or None."""
    found = [rule for key in RULE_KEYS if (rule := layer.get(key)) is not None]
    if len(found) == 2:
        raise ExperimentError(
            f"{found[1].where}: {layer.kind} has both learning_rule and lrule_init: expected one of them"
        )
    return found[0] if found else None


Counts = tuple[int | None, int | None]


def _both(counts: Counts) -> tuple[int, int] | None:
    first, second = counts
    return None if first is None or second is None else (first, second)


def _weights(
    layer: TaggedValue, converted: ConvertedLayers, matrix: Counts, fans: Counts, bias: bool = False
) -> tuple[dict[str, Any], TaggedValue]:
    """Returns the options that layers with weights have in common, and the layer's optimizer.

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
    _check_bias_rule(layer, converted, optimizer, has_bias=options["bias"])
    return options, optimizer


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


def _check_bias_rule(layer: TaggedValue, converted: ConvertedLayers, optimizer: TaggedValue, has_bias: bool) -> None:
    bias_rule = layer.get("brule_init")
    if bias_rule is None or layer.name in ("CrossMapPoolingLayer", "LocalFilteringLayer"):
        return
    if not has_bias:
        converted.notes.append(f"{bias_rule.where}: brule_init has no effect: without bias_init there is no bias")
    elif plain(learning_rule(bias_rule)) != plain(optimizer):
        raise ExperimentError(
            f"{bias_rule.where}: {layer.kind}: expected brule_init to be the learning rule of the weights: different "
            "rules for bias and weights are not supported"
        )


def _window(layer: TaggedValue) -> dict[str, Any]:
    shape = layer.get("fshape")
    if shape is None:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs the key 'fshape'")
    sides = layer.plain("fshape")
    is_square = isinstance(sides, list) and len(set(map(str, sides))) == 1 and sides
    return {"kernel": at(shape.where, sides[0] if is_square else sides), "stride": layer.get("stride") or 1}


def _require_images(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Checks the inputs of a local layer; as in neon, a vector is reshaped to a square image with one channel."""
    if converted.shape is not None and len(converted.shape) == 1:
        image = shapes.square(converted.shape)
        if image is None:
            raise ExperimentError(
                f"{layer.where}: {layer.kind} needs images, got vectors of {converted.shape[0]} values, which are not "
                "a square image with one channel: set is_local, nofm and ofmshape in DataLayer"
            )
        _add(converted, layer, "reshape", {"shape": list(image)})
        converted.shape = image
    check_inputs(layer, converted.shape)


def _maps(converted: ConvertedLayers) -> int | None:
    return None if converted.shape is None else converted.shape[0]


def _data(layer: TaggedValue, converted: ConvertedLayers) -> None:
    converted.shape, reshaped = shapes.check_data_layer(layer, converted.shape)
    if reshaped and converted.shape is not None:
        _add(converted, layer, "reshape", {"shape": list(converted.shape)})


def _cost(layer: TaggedValue, converted: ConvertedLayers) -> None:
    found = layer.get("cost")
    if found is None:
        raise ExperimentError(f"{layer.where}: CostLayer needs the key 'cost'")
    check_inputs(layer, converted.shape)
    check_olayer(found, converted.last)
    converted.cost, converted.target = cost_of(found, converted.batch_size), cost_target(layer)


def cost_target(layer: TaggedValue) -> str:
    """Returns the target of a CostLayer: "labels", or "inputs" for the outputs of the DataLayer."""
    reference = layer.get("ref_layer")
    if reference is not None and reference.name not in ("DataLayer", "ImageDataLayer"):
        raise ExperimentError(
            f"{reference.where}: CostLayer: expected ref_layer to be the DataLayer, got {reference.kind or 'no layer'}"
        )
    label = layer.string("ref_label", "targets")
    targets = {"targets": "labels", "labels": "labels", "output": "inputs"}
    if label not in targets:
        where = layer.get("ref_label")
        raise ExperimentError(
            f"{(where or layer).where}: CostLayer: the ref_label {label!r} is not supported. {nearest(label, targets)}"
        )
    return targets[label]


def _fully_connected(layer: TaggedValue, converted: ConvertedLayers) -> None:
    bias = check_inputs(layer, converted.shape, bias=layer.name == "Layer")
    units, inputs = positive_integer(layer.get("nout")), None if converted.shape is None else math.prod(converted.shape)
    columns = None if inputs is None else inputs + bias
    options, rule = _weights(layer, converted, (units, columns), (inputs, units), bias)
    _add(converted, layer, "linear", {"units": layer.get("nout"), **options}, rule)
    converted.shape = None if units is None else (units,)


def _convolution(layer: TaggedValue, converted: ConvertedLayers) -> None:
    _require_images(layer, converted)
    kind = "local" if layer.plain("local_conv") else "conv"
    maps, window = positive_integer(layer.get("nofm")), {**_window(layer), "padding": layer.get("pad")}
    shape = shapes.after_window(converted.shape, window, maps)
    fans = _window_fans(converted.shape, window, maps)
    inputs = fans[0]
    rows = None if inputs is None or shape is None else inputs * (math.prod(shape[1:]) if kind == "local" else 1)
    options, rule = _weights(layer, converted, (rows, maps), fans)
    shared, found = bool(layer.plain("shared_bias", True)), layer.get("shared_bias")
    if options["bias"] and shared == (kind == "local"):
        raise ExperimentError(
            f"{(found or layer).where}: {layer.kind}: shared_bias: {shared} is not supported with local_conv: "
            f"{kind == 'local'}: a convolution has a bias per channel, and local filters one per pixel"
        )
    if found is not None and not options["bias"]:
        converted.notes.append(f"{found.where}: shared_bias has no effect: without bias_init there is no bias")
    _add(converted, layer, kind, {"maps": layer.get("nofm"), **window, **options}, rule)
    converted.shape = shape


def _window_fans(shape: Shape | None, window: dict[str, Any], maps: int | None) -> Counts:
    kernel = plain(window["kernel"])
    sides = kernel if isinstance(kernel, list) else [kernel] * (len(shape or ()) - 1)
    if shape is None or not all(isinstance(side, int) for side in sides):
        return None, None
    return shape[0] * math.prod(sides), None if maps is None else maps * math.prod(sides)


def _local_filter(layer: TaggedValue, converted: ConvertedLayers) -> None:
    _require_images(layer, converted)
    for key in ("sparsity", "tied_weights"):
        if (found := layer.get(key)) is not None and not converted.pretrained:
            converted.notes.append(f"{found.where}: {key} has no effect: only the model GB is pretrained")
    maps, window = positive_integer(layer.get("nofm")), _window(layer)
    shape = shapes.after_window(converted.shape, window, maps)
    fans = _window_fans(converted.shape, window, maps)
    options, rule = _weights(layer, converted, (None if shape is None else math.prod(shape), fans[0]), fans)
    if options["bias"]:
        raise ExperimentError(f"{layer.where}: {layer.kind} has no bias: remove bias_init from its weight_init")
    _add(converted, layer, "local", {"maps": layer.get("nofm"), **window, **options, "unit_norm": True}, rule)
    converted.shape = shape


def _pool(kind: str) -> Callable[[TaggedValue, ConvertedLayers], None]:
    def add(layer: TaggedValue, converted: ConvertedLayers) -> None:
        _require_images(layer, converted)
        check_outputs(layer, "nofm", _maps(converted))
        window = {**_window(layer), "padding": layer.get("pad")}
        shape = shapes.after_window(converted.shape, window, _maps(converted))
        if layer.plain("maxout", 1) != 1:
            shape = _maxout(layer, converted, kind, window, shape)
        else:
            _add(converted, layer, kind, window)
        converted.shape = shape

    return add


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
    _add(converted, layer, "reshape", {"shape": [1, *before]})
    _add(converted, layer, kind, volume)
    _add(converted, layer, "reshape", {"shape": list(after)})
    return after


def _per_side(value: TaggedValue | int | None, sides: int) -> list[int]:
    number = plain(value) if isinstance(value, TaggedValue) else value
    return number if isinstance(number, list) else [number or 0] * sides


def _pooling(layer: TaggedValue, converted: ConvertedLayers) -> None:
    operations = {"max": "max_pool", "avg": "avg_pool", "l2": "l2_pool"}
    operation = layer.string("op", "max")
    if operation not in operations:
        raise ExperimentError(
            f"{layer.where}: pooling by {operation!r} is not supported. {nearest(operation, operations)}"
        )
    _pool(operations[operation])(layer, converted)


def _contrast(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Converts contrast normalisation: before neon's release by a Gaussian window, later by the responses."""
    _require_images(layer, converted)
    check_outputs(layer, "nofm", _maps(converted))
    if layer.name == "LCNLayer":
        _add(converted, layer, "lcn", {"kernel": _window(layer)["kernel"]})
    else:
        strength = {"alpha": _number(layer, "alpha"), "beta": _number(layer, "beta")}
        _add(converted, layer, "lcn", {"kernel": layer.get("ksize"), "method": "response", **strength})


def _response(layer: TaggedValue, converted: ConvertedLayers) -> None:
    _require_images(layer, converted)
    options = {"size": layer.get("ksize"), "alpha": _number(layer, "alpha"), "beta": _number(layer, "beta")}
    _add(converted, layer, "response_norm", options)


def _number(layer: TaggedValue, key: str) -> TaggedValue:
    found = layer.get(key)
    if found is None:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs the key {key!r}")
    return as_float(found)


def _cross_map_pool(layer: TaggedValue, converted: ConvertedLayers) -> None:
    """Converts to a convolution with kernel 1, as in neon 0.9; its weights may become negative."""
    _require_images(layer, converted)
    maps, inputs = positive_integer(layer.get("nofm")), _maps(converted)
    options, rule = _weights(layer, converted, (inputs, maps), (inputs, maps))
    if options["bias"]:
        raise ExperimentError(f"{layer.where}: {layer.kind} has no bias: remove bias_init from its weight_init")
    _add(converted, layer, "conv", {"maps": layer.get("nofm"), "kernel": 1, **options}, rule)
    converted.shape = None if converted.shape is None or maps is None else (maps, *converted.shape[1:])


def _dropout(layer: TaggedValue, converted: ConvertedLayers) -> None:
    check_inputs(layer, converted.shape)
    keep = layer.get("keep")
    _add(converted, layer, "dropout", {"keep": 0.5 if keep is None else as_float(keep)})


def _activation(layer: TaggedValue, converted: ConvertedLayers) -> None:
    check_inputs(layer, converted.shape)
    found = layer.get("activation")
    new = activation(found) if found is not None else None
    if new is None:
        return
    if isinstance(new.value, dict):
        options = {key: item for key, item in new.value.items() if key != "name"}
        _add(converted, layer, new.value["name"].value, options)
    else:
        _add(converted, layer, new.value, {})


def _slice(layer: TaggedValue, converted: ConvertedLayers) -> None:
    check_inputs(layer, converted.shape)
    if layer.get("end_idx") is None:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs the key 'end_idx'")
    _add(converted, layer, "slice", {"last": layer.get("end_idx")})
    last = positive_integer(layer.get("end_idx"))
    converted.shape = None if converted.shape is None or last is None else (last, *converted.shape[1:])


def _nested(kind: str) -> Callable[[TaggedValue, ConvertedLayers], None]:
    def add(layer: TaggedValue, converted: ConvertedLayers) -> None:
        found = layer.get("sublayers")
        if found is None:
            raise ExperimentError(f"{layer.where}: {layer.kind} needs the key 'sublayers'")
        if not isinstance(found.value, list):
            raise ExperimentError(f"{found.where}: expected sublayers to be a list")
        inner = converted.inside()
        branch_shapes: list[Shape | None] = []
        for sublayer in found.value:
            if kind == "branch":  # all have the same input
                inner.shape = converted.shape
            convert_layers(at(sublayer.where, [sublayer]), inner, inner=True)
            branch_shapes.append(inner.shape)
        converted.include(inner)
        _add(converted, layer, kind, {"layers": inner.layers})
        converted.shape = _concatenated(branch_shapes) if kind == "branch" else inner.shape

    return add


def _concatenated(shapes: list[Shape | None]) -> Shape | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({shape[1:] for shape in known}) != 1:
        return None
    return (sum(shape[0] for shape in known), *known[0][1:])


def _unsupported(alternative: str) -> Callable[[TaggedValue, ConvertedLayers], None]:
    def reject(layer: TaggedValue, converted: ConvertedLayers) -> None:
        raise ExperimentError(f"{layer.where}: {layer.kind} is not supported{alternative}")

    return reject


_RECURRENT = _unsupported(
    ": it keeps its state from batch to batch. Here a sample is a sequence: in TorchMN's format, `dataset: {name: "
    "text, length: 20}`, `- lstm: {units: 64}` (or rnn, gru) and `- linear: 96` predict the next character"
)
_BOLTZMANN = _unsupported(
    " in neon's models, which are trained without labels. In TorchMN's format, put layers `- rbm: {units: 500, "
    "pretraining: {epochs: 1, lr: 0.1}}` before a last `- linear: 10`"
)
LAYERS: dict[str, Callable[[TaggedValue, ConvertedLayers], None]] = {
    "DataLayer": _data, "ImageDataLayer": _data, "CostLayer": _cost,
    "FCLayer": _fully_connected, "Layer": _fully_connected, "LayerWithNoBias": _fully_connected,
    "AELayer": _fully_connected,
    "ConvLayer": _convolution, "LocalFilteringLayer": _local_filter,
    "PoolingLayer": _pooling, "MaxPoolingLayer": _pool("max_pool"), "L2PoolingLayer": _pool("l2_pool"),
    "AveragePoolingLayer": _pool("avg_pool"), "LCNLayer": _contrast, "LocalContrastNormLayer": _contrast,
    "CrossMapResponseNormLayer": _response, "CrossMapPoolingLayer": _cross_map_pool, "DropOutLayer": _dropout,
    "RecurrentHiddenLayer": _RECURRENT, "RecurrentLSTMLayer": _RECURRENT, "RecurrentOutputLayer": _RECURRENT,
    "RecurrentCostLayer": _RECURRENT, "RecurrentLayer": _RECURRENT, "RBMLayer": _BOLTZMANN, "SliceLayer": _slice,
    "ActivationLayer": _activation, "BranchLayer": _nested("branch"), "ListLayer": _nested("list"),
}  # fmt: skip
