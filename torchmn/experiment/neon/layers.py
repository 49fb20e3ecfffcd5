"""neon's layers, in our words. Shapes follow from layer to layer: those that files computed by hand are checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.neon import shapes
from torchmn.experiment.neon.keys import rule_type
from torchmn.experiment.neon.rules import DEFAULT, learning_rule
from torchmn.experiment.neon.shapes import Shape, check_inputs, check_outputs, whole
from torchmn.experiment.neon.tagged_value import Said, at, number_of, plain
from torchmn.experiment.neon.values import DEFAULT_INITIALIZER, activation, cost_of, initializer, one_of

RULE_KEYS = ("learning_rule", "lrule_init")
NOT_DRAWN_FOR_A_BIAS = ("glorot", "auto_uniform", "sparse_eigen", "orthonormal")


@dataclass
class Chain:
    """What a list of layers says: layers in our words, cost and target, and the learning rules of each."""

    layers: list[Said] = field(default_factory=list)
    rules: list[tuple[int, Said]] = field(default_factory=list)
    cost: Said | None = None
    target: str = "labels"
    notes: list[str] = field(default_factory=list)
    batch_size: Said | None = None
    default_rule: Said | None = None
    shape: Shape | None = None
    pretrained: bool = False


def convert_layers(said: Said, chain: Chain, inner: bool = False) -> Chain:
    """The layers of a model, or of a branch of it, added to an empty chain that has the shape of their inputs."""
    if not isinstance(said.value, list):
        raise ExperimentError(f"{said.where}: expected layers to be a list")
    for layer in said.value:
        convert = one_of(LAYERS, layer, "the layer")
        check_batch_size(layer, chain)
        convert(layer, chain)
    if not inner and not chain.layers:
        raise ExperimentError(f"{said.where}: there are no layers between data and cost")
    return chain


def check_batch_size(layer: Said, chain: Chain) -> None:
    """Refuses a layer with another batch size than the model has."""
    own, whole_model = layer.get("batch_size"), chain.batch_size
    if own is not None and whole_model is not None and plain(own) != plain(whole_model):
        raise ExperimentError(
            f"{own.where}: {layer.kind}: expected batch_size to be that of the model, {plain(whole_model)}, got "
            f"{plain(own)}"
        )


def _add(chain: Chain, said: Said, kind: str, options: dict[str, Any]) -> None:
    chain.layers.append(at(said.where, {kind: at(said.where, options)}))


def rule_of(said: Said) -> Said | None:
    """The learning rule of a layer, as the file has it."""
    found = [rule for key in RULE_KEYS if (rule := said.get(key)) is not None]
    if len(found) == 2:
        raise ExperimentError(
            f"{found[1].where}: {said.kind} has both learning_rule and lrule_init: expected one of them"
        )
    return found[0] if found else None


Counts = tuple[int | None, int | None]


def _known(counts: Counts) -> tuple[int, int] | None:
    first, second = counts
    return None if first is None or second is None else (first, second)


def _weights(said: Said, chain: Chain, matrix: Counts, fans: Counts, bias: bool = False) -> dict[str, Any]:
    """What layers with weights have in common.

    matrix, fans: as `initializer` takes them; bias: whether neon counts a bias among the inputs
    """
    options: dict[str, Any] = {"bias": bias}
    begins: float | None = None
    if (found := said.get("weight_init")) is not None:
        options["init"], begins = initializer(found, _known(matrix), _known(fans))
    else:
        options["init"] = at(said.where, DEFAULT_INITIALIZER)
    if begins is not None:
        options |= {"bias": True, "bias_init": begins}
    elif bias:  # it was one more column of the weights
        name = options["init"].plain("name")
        if name in NOT_DRAWN_FOR_A_BIAS:
            raise ExperimentError(
                f"{said.where}: {said.kind}: nin counts neon's bias, and its first values as {name} are not supported: "
                "say bias_init in weight_init"
            )
        options["bias_init"] = "init"
    if (found := said.get("activation")) is not None:
        options["activation"] = activation(found)
    if said.plain("batch_norm") and said.name != "CrossMapPoolingLayer":
        options["batch_norm"] = True
    rule = rule_of(said)
    if rule is not None and rule_type(rule) == "gradient_descent_pretrain" and not chain.pretrained:
        where = (rule.get("lr_params") or rule).where
        chain.notes.append(f"{where}: pretrain_learning_rate has no meaning today: only the model GB is pretrained")
    ours = learning_rule(rule) if rule is not None else chain.default_rule or at(said.where, DEFAULT)
    chain.rules.append((len(chain.layers), ours))
    if (own := said.get("brule_init")) is not None and said.name not in ("CrossMapPoolingLayer", "LocalFilteringLayer"):
        if not options["bias"]:
            chain.notes.append(f"{own.where}: brule_init has no meaning today: without bias_init there is no bias")
        elif plain(learning_rule(own)) != plain(ours):
            raise ExperimentError(
                f"{own.where}: {said.kind}: a brule_init that differs from the rule of the weights is not supported: "
                "the biases of a layer learn as its weights do"
            )
    return options


def _window(said: Said) -> dict[str, Any]:
    shape = said.get("fshape")
    if shape is None:
        raise ExperimentError(f"{said.where}: {said.kind} needs the key 'fshape'")
    sides = said.plain("fshape")
    square = isinstance(sides, list) and len(set(map(str, sides))) == 1 and sides
    return {"kernel": at(shape.where, sides[0] if square else sides), "stride": said.get("stride") or 1}


def _images(said: Said, chain: Chain) -> None:
    """What a local layer gets: a vector becomes a square image of one map, as neon had it."""
    if chain.shape is not None and len(chain.shape) == 1:
        image = shapes.square(chain.shape)
        if image is None:
            raise ExperimentError(
                f"{said.where}: {said.kind} needs images, and gets vectors of {chain.shape[0]} values, of which neon "
                "makes a square image of one map: say is_local, nofm and ofmshape in DataLayer"
            )
        _add(chain, said, "reshape", {"shape": list(image)})
        chain.shape = image
    check_inputs(said, chain.shape)


def _maps(chain: Chain) -> int | None:
    return None if chain.shape is None else chain.shape[0]


def _data(said: Said, chain: Chain) -> None:
    chain.shape, reshaped = shapes.check_data_layer(said, chain.shape)
    if reshaped and chain.shape is not None:
        _add(chain, said, "reshape", {"shape": list(chain.shape)})


def _cost(said: Said, chain: Chain) -> None:
    found = said.get("cost")
    if found is None:
        raise ExperimentError(f"{said.where}: CostLayer needs the key 'cost'")
    check_inputs(said, chain.shape)
    chain.cost, chain.target = cost_of(found, chain.batch_size), cost_target(said)


def cost_target(said: Said) -> str:
    """Against what a CostLayer compares: labels, or the inputs that its DataLayer put out."""
    reference = said.get("ref_layer")
    if reference is not None and reference.name not in ("DataLayer", "ImageDataLayer"):
        raise ExperimentError(
            f"{reference.where}: CostLayer: expected ref_layer to be the DataLayer, got {reference.kind or 'no layer'}"
        )
    label = said.word("ref_label", "targets")
    targets = {"targets": "labels", "labels": "labels", "output": "inputs"}
    if label not in targets:
        where = said.get("ref_label")
        raise ExperimentError(
            f"{(where or said).where}: CostLayer: the ref_label {label!r} is not supported. {nearest(label, targets)}"
        )
    return targets[label]


def _fully_connected(said: Said, chain: Chain) -> None:
    bias = check_inputs(said, chain.shape, bias=said.name == "Layer")
    units, inputs = whole(said.get("nout")), None if chain.shape is None else math.prod(chain.shape)
    columns = None if inputs is None else inputs + bias
    options = _weights(said, chain, (units, columns), (inputs, units), bias)
    _add(chain, said, "linear", {"units": said.get("nout"), **options})
    chain.shape = None if units is None else (units,)


def _convolution(said: Said, chain: Chain) -> None:
    _images(said, chain)
    kind = "local" if said.plain("local_conv") else "conv"
    maps, window = whole(said.get("nofm")), {**_window(said), "padding": said.get("pad")}
    shape = shapes.after_window(chain.shape, window, maps)
    fans = _window_fans(chain.shape, window, maps)
    inputs = fans[0]
    rows = None if inputs is None or shape is None else inputs * (math.prod(shape[1:]) if kind == "local" else 1)
    options = _weights(said, chain, (rows, maps), fans)
    shared, found = bool(said.plain("shared_bias", True)), said.get("shared_bias")
    if options["bias"] and shared == (kind == "local"):
        raise ExperimentError(
            f"{(found or said).where}: {said.kind}: shared_bias: {shared} is not supported with local_conv: "
            f"{kind == 'local'}: a convolution has a bias for each map, and local filters one for each pixel"
        )
    if found is not None and not options["bias"]:
        chain.notes.append(f"{found.where}: shared_bias has no meaning today: without bias_init there is no bias")
    _add(chain, said, kind, {"maps": said.get("nofm"), **window, **options})
    chain.shape = shape


def _window_fans(shape: Shape | None, window: dict[str, Any], maps: int | None) -> Counts:
    kernel = plain(window["kernel"])
    sides = kernel if isinstance(kernel, list) else [kernel] * (len(shape or ()) - 1)
    if shape is None or not all(isinstance(side, int) for side in sides):
        return None, None
    return shape[0] * math.prod(sides), None if maps is None else maps * math.prod(sides)


def _local_filter(said: Said, chain: Chain) -> None:
    _images(said, chain)
    for key in ("sparsity", "tied_weights"):
        if (found := said.get(key)) is not None and not chain.pretrained:
            chain.notes.append(f"{found.where}: {key} has no meaning today: only the model GB is pretrained")
    maps, window = whole(said.get("nofm")), _window(said)
    shape = shapes.after_window(chain.shape, window, maps)
    fans = _window_fans(chain.shape, window, maps)
    options = _weights(said, chain, (None if shape is None else math.prod(shape), fans[0]), fans)
    if options["bias"]:
        raise ExperimentError(f"{said.where}: {said.kind} has no bias: leave bias_init out of its weight_init")
    _add(chain, said, "local", {"maps": said.get("nofm"), **window, **options, "unit_norm": True})
    chain.shape = shape


def _pool(kind: str) -> Callable[[Said, Chain], None]:
    def add(said: Said, chain: Chain) -> None:
        _images(said, chain)
        check_outputs(said, "nofm", _maps(chain))
        window = {**_window(said), "padding": said.get("pad")}
        _add(chain, said, kind, window)
        chain.shape = shapes.after_window(chain.shape, window, _maps(chain))

    return add


def _pooling(said: Said, chain: Chain) -> None:
    operations = {"max": "max_pool", "avg": "avg_pool", "l2": "l2_pool"}
    operation = said.word("op", "max")
    if operation not in operations:
        raise ExperimentError(
            f"{said.where}: pooling by {operation!r} is not supported. {nearest(operation, operations)}"
        )
    _pool(operations[operation])(said, chain)


def _contrast(said: Said, chain: Chain) -> None:
    """Before the release by a Gaussian window (LCNLayer), afterwards by the strength of responses."""
    _images(said, chain)
    check_outputs(said, "nofm", _maps(chain))
    if said.name == "LCNLayer":
        _add(chain, said, "lcn", {"kernel": _window(said)["kernel"]})
    else:
        strength = {"alpha": _number(said, "alpha"), "beta": _number(said, "beta")}
        _add(chain, said, "lcn", {"kernel": said.get("ksize"), "method": "response", **strength})


def _response(said: Said, chain: Chain) -> None:
    _images(said, chain)
    options = {"size": said.get("ksize"), "alpha": _number(said, "alpha"), "beta": _number(said, "beta")}
    _add(chain, said, "response_norm", options)


def _number(said: Said, key: str) -> Said:
    found = said.get(key)
    if found is None:
        raise ExperimentError(f"{said.where}: {said.kind} needs the key {key!r}")
    return number_of(found)


def _cross_map_pool(said: Said, chain: Chain) -> None:
    """A convolution of one pixel, which is what neon 0.9 calls it; its weights may become negative."""
    _images(said, chain)
    maps, inputs = whole(said.get("nofm")), _maps(chain)
    options = _weights(said, chain, (inputs, maps), (inputs, maps))
    if options["bias"]:
        raise ExperimentError(f"{said.where}: {said.kind} has no bias: leave bias_init out of its weight_init")
    _add(chain, said, "conv", {"maps": said.get("nofm"), "kernel": 1, **options})
    chain.shape = None if chain.shape is None or maps is None else (maps, *chain.shape[1:])


def _dropout(said: Said, chain: Chain) -> None:
    check_inputs(said, chain.shape)
    keep = said.get("keep")
    _add(chain, said, "dropout", {"keep": 0.5 if keep is None else number_of(keep)})


def _activation(said: Said, chain: Chain) -> None:
    check_inputs(said, chain.shape)
    found = said.get("activation")
    ours = activation(found) if found is not None else None
    if ours is not None:
        named = isinstance(ours.value, dict)
        kind = ours.value["name"].value if named else ours.value
        _add(chain, said, kind, {key: item for key, item in ours.value.items() if key != "name"} if named else {})


def _slice(said: Said, chain: Chain) -> None:
    check_inputs(said, chain.shape)
    if said.get("end_idx") is None:
        raise ExperimentError(f"{said.where}: {said.kind} needs the key 'end_idx'")
    _add(chain, said, "slice", {"last": said.get("end_idx")})
    last = whole(said.get("end_idx"))
    chain.shape = None if chain.shape is None or last is None else (last, *chain.shape[1:])


def _nested(kind: str) -> Callable[[Said, Chain], None]:
    def add(said: Said, chain: Chain) -> None:
        found = said.get("sublayers")
        if found is None:
            raise ExperimentError(f"{said.where}: {said.kind} needs the key 'sublayers'")
        if not isinstance(found.value, list):
            raise ExperimentError(f"{found.where}: expected sublayers to be a list")
        inner = Chain(batch_size=chain.batch_size, default_rule=chain.default_rule, shape=chain.shape)
        ends: list[Shape | None] = []
        for layer in found.value:
            if kind == "branch":  # each gets the same input
                inner.shape = chain.shape
            convert_layers(at(layer.where, [layer]), inner, inner=True)
            ends.append(inner.shape)
        chain.rules += [(-1, rule) for _, rule in inner.rules]
        chain.notes += inner.notes
        _add(chain, said, kind, {"layers": inner.layers})
        chain.shape = _joined(ends) if kind == "branch" else inner.shape

    return add


def _joined(ends: list[Shape | None]) -> Shape | None:
    known = [end for end in ends if end is not None]
    if len(known) < len(ends) or len({end[1:] for end in known}) != 1:
        return None
    return (sum(end[0] for end in known), *known[0][1:])


def _elsewhere(why: str) -> Callable[[Said, Chain], None]:
    def refuse(said: Said, chain: Chain) -> None:
        raise ExperimentError(f"{said.where}: {said.kind} is not supported{why}")

    return refuse


_RECURRENT = _elsewhere(
    ": it carries its state from batch to batch. Here a sample is a sequence: in our format, `dataset: {name: text, "
    "length: 20}`, `- lstm: {units: 64}` (or rnn, gru) and `- linear: 96` predict the next character"
)
_BOLTZMANN = _elsewhere(
    " in the models of neon, which end there. In our format, layers `- rbm: {units: 500, pretraining: {epochs: 1, lr: "
    "0.1}}` stand before a last `- linear: 10`"
)
LAYERS: dict[str, Callable[[Said, Chain], None]] = {
    "DataLayer": _data, "ImageDataLayer": _data, "CostLayer": _cost,
    "FCLayer": _fully_connected, "Layer": _fully_connected, "LayerWithNoBias": _fully_connected,
    "ConvLayer": _convolution, "LocalFilteringLayer": _local_filter,
    "PoolingLayer": _pooling, "MaxPoolingLayer": _pool("max_pool"), "L2PoolingLayer": _pool("l2_pool"),
    "AveragePoolingLayer": _pool("avg_pool"), "LCNLayer": _contrast, "LocalContrastNormLayer": _contrast,
    "CrossMapResponseNormLayer": _response, "CrossMapPoolingLayer": _cross_map_pool, "DropOutLayer": _dropout,
    "RecurrentHiddenLayer": _RECURRENT, "RecurrentLSTMLayer": _RECURRENT, "RecurrentOutputLayer": _RECURRENT,
    "RecurrentCostLayer": _RECURRENT, "RecurrentLayer": _RECURRENT, "RBMLayer": _BOLTZMANN, "SliceLayer": _slice,
    "ActivationLayer": _activation, "BranchLayer": _nested("branch"), "ListLayer": _nested("list"),
}  # fmt: skip
