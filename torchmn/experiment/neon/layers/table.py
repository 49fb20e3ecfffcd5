"""Converts lists of layers, by the class of each.

Shapes are computed from layer to layer, and those that a file states are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.tagged_value import TaggedValue, as_float, at
from torchmn.experiment.neon.layers.converted import ConvertedLayers, add, check_batch_size
from torchmn.experiment.neon.layers.images import (
    contrast_norm,
    convolution,
    cross_map_pool,
    local_filter,
    pool,
    pooling,
    response_norm,
)
from torchmn.experiment.neon.layers.weights import weights_of
from torchmn.experiment.neon.terms import shapes
from torchmn.experiment.neon.terms.shapes import Shape, check_inputs, positive_integer
from torchmn.experiment.neon.terms.values import activation, check_cost, cost_of, one_of


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


def _data(layer: TaggedValue, converted: ConvertedLayers) -> None:
    converted.shape, reshaped = shapes.check_data_layer(layer, converted.shape)
    if reshaped and converted.shape is not None:
        add(converted, layer, "reshape", {"shape": list(converted.shape)})


def _cost(layer: TaggedValue, converted: ConvertedLayers) -> None:
    found = layer.get("cost")
    if found is None:
        raise ExperimentError(f"{layer.where}: CostLayer needs the key 'cost'")
    check_inputs(layer, converted.shape)
    check_cost(found, converted.last)
    converted.cost, converted.target = cost_of(found, converted.batch_size), cost_target(layer)


def cost_target(layer: TaggedValue) -> str:
    """Returns the target of a CostLayer: "labels", or "inputs" for the outputs of the DataLayer."""
    reference = layer.get("ref_layer")
    if reference is not None and reference.name not in ("DataLayer", "ImageDataLayer"):
        raise ExperimentError(
            f"{reference.where}: CostLayer: expected ref_layer to be the DataLayer, got {reference.kind or 'no layer'}"
        )
    label = layer.string("ref_label", "targets")
    targets = {"targets": "labels", "labels": "labels", "output": "inputs", "inputs": "inputs"}
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
    options, rule = weights_of(layer, converted, (units, columns), (inputs, units), bias)
    add(converted, layer, "linear", {"units": layer.get("nout"), **options}, rule)
    converted.shape = None if units is None else (units,)


def _dropout(layer: TaggedValue, converted: ConvertedLayers) -> None:
    check_inputs(layer, converted.shape)
    keep = layer.get("keep")
    add(converted, layer, "dropout", {"keep": 0.5 if keep is None else as_float(keep)})


def _activation(layer: TaggedValue, converted: ConvertedLayers) -> None:
    check_inputs(layer, converted.shape)
    found = layer.get("activation")
    new = activation(found) if found is not None else None
    if new is None:
        return
    if isinstance(new.value, dict):
        options = {key: item for key, item in new.value.items() if key != "name"}
        add(converted, layer, new.value["name"].value, options)
    else:
        add(converted, layer, new.value, {})


def _slice(layer: TaggedValue, converted: ConvertedLayers) -> None:
    check_inputs(layer, converted.shape)
    if layer.get("end_idx") is None:
        raise ExperimentError(f"{layer.where}: {layer.kind} needs the key 'end_idx'")
    add(converted, layer, "slice", {"last": layer.get("end_idx")})
    last = positive_integer(layer.get("end_idx"))
    converted.shape = None if converted.shape is None or last is None else (last, *converted.shape[1:])


def _nested(kind: str) -> Callable[[TaggedValue, ConvertedLayers], None]:
    def convert(layer: TaggedValue, converted: ConvertedLayers) -> None:
        check_inputs(layer, converted.shape)
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
        add(converted, layer, kind, {"layers": inner.layers})
        converted.shape = _concatenated(branch_shapes) if kind == "branch" else inner.shape

    return convert


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
    "ConvLayer": convolution, "LocalFilteringLayer": local_filter,
    "PoolingLayer": pooling, "MaxPoolingLayer": pool("max_pool"), "L2PoolingLayer": pool("l2_pool"),
    "AveragePoolingLayer": pool("avg_pool"), "LCNLayer": contrast_norm, "LocalContrastNormLayer": contrast_norm,
    "CrossMapResponseNormLayer": response_norm, "CrossMapPoolingLayer": cross_map_pool, "DropOutLayer": _dropout,
    "RecurrentHiddenLayer": _RECURRENT, "RecurrentLSTMLayer": _RECURRENT, "RecurrentOutputLayer": _RECURRENT,
    "RecurrentCostLayer": _RECURRENT, "RecurrentLayer": _RECURRENT, "RBMLayer": _BOLTZMANN, "SliceLayer": _slice,
    "ActivationLayer": _activation, "BranchLayer": _nested("branch"), "ListLayer": _nested("list"),
}  # fmt: skip
