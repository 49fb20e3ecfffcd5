"""neon's layers, in our words. Shapes that files computed by hand are left out: they follow from layer to layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.neon.said import Said, at
from torchmn.experiment.neon.values import activation, cost_of, initializer, learning_rule, one_of

# What follows from the layer before, or said something about neon itself.
INFERRED = (
    "name", "backend", "batch_size", "pos", "nin", "ifmshape", "nifm", "ofmshape", "dtype", "weight_dtype",
    "output_dtype", "backend_type", "is_local", "prev_layer", "dist_mode", "dist_flag", "prev_names", "lcn_layer_flag",
)  # fmt: skip
RULE_KEYS = ("learning_rule", "lrule_init")
WEIGHT_KEYS = ("weight_init", *RULE_KEYS, "brule_init", "activation", "batch_norm")


@dataclass
class Chain:
    """What a list of layers says: layers in our words, cost and target, and the learning rules of each."""

    layers: list[Said] = field(default_factory=list)
    rules: list[tuple[int, Said]] = field(default_factory=list)
    cost: Said | None = None
    target: str = "labels"
    notes: list[str] = field(default_factory=list)
    batch_size: Said | None = None


def convert_layers(said: Said, inner: bool = False, batch_size: Said | None = None) -> Chain:
    """The layers of a model, or of a branch of it."""
    chain = Chain(batch_size=batch_size)
    if not isinstance(said.value, list):
        raise ExperimentError(f"{said.where}: expected layers to be a list")
    for layer in said.value:
        one_of(LAYERS, layer, "the layer")(layer, chain)
    if not inner and not chain.layers:
        raise ExperimentError(f"{said.where}: there are no layers between data and cost")
    return chain


def _checked(said: Said, *known: str) -> None:
    for key, value in said.items():
        if key not in (*INFERRED, *known):
            raise ExperimentError(
                f"{value.where}: {said.kind} has no key {key!r} that is known here. {nearest(key, known or INFERRED)}"
            )


def _add(chain: Chain, said: Said, kind: str, options: dict[str, Any]) -> None:
    chain.layers.append(at(said.where, {kind: at(said.where, options)}))


def _weights(said: Said, chain: Chain) -> dict[str, Any]:
    """What layers with weights have in common."""
    options: dict[str, Any] = {"bias": False}
    if (found := said.get("weight_init")) is not None:
        options["init"], bias = initializer(found)
        if bias is not None:
            options |= {"bias": True, "bias_init": bias}
    if (found := said.get("activation")) is not None:
        options["activation"] = activation(found)
    if said.plain("batch_norm"):
        options["batch_norm"] = True
    rule = next((found for key in RULE_KEYS if (found := said.get(key)) is not None), None)
    if rule is not None:
        chain.rules.append((len(chain.layers), learning_rule(rule)))
    if (own := said.get("brule_init")) is not None and own is not rule:
        chain.notes.append(f"{own.where}: brule_init: biases learn as the weights of their layer do")
    return options


def _window(said: Said) -> dict[str, Any]:
    shape = said.get("fshape")
    if shape is None:
        raise ExperimentError(f"{said.where}: {said.kind} needs the key 'fshape'")
    sides = said.plain("fshape")
    square = isinstance(sides, list) and len(set(map(str, sides))) == 1 and sides
    return {"kernel": at(shape.where, sides[0] if square else sides), "stride": said.get("stride") or 1}


def _data(said: Said, chain: Chain) -> None:
    _checked(said, "nout", "nofm", "ofmshape", "has_labels")


def _cost(said: Said, chain: Chain) -> None:
    _checked(said, "ref_layer", "ref_label", "raw_label", "category_label", "cost")
    found = said.get("cost")
    if found is None:
        raise ExperimentError(f"{said.where}: CostLayer needs the key 'cost'")
    chain.cost = cost_of(found, chain.batch_size)
    chain.target = "inputs" if said.plain("ref_label", "targets") == "output" else "labels"


def _fully_connected(said: Said, chain: Chain) -> None:
    _checked(said, "nout", *WEIGHT_KEYS)
    _add(chain, said, "linear", {"units": said.get("nout"), **_weights(said, chain)})


def _convolution(said: Said, chain: Chain) -> None:
    _checked(said, "nofm", "fshape", "stride", "pad", "local_conv", "shared_bias", *WEIGHT_KEYS)
    kind = "local" if said.plain("local_conv") else "conv"
    _add(
        chain,
        said,
        kind,
        {"maps": said.get("nofm"), **_window(said), "padding": said.get("pad"), **_weights(said, chain)},
    )


def _local_filter(said: Said, chain: Chain) -> None:
    _checked(said, "nofm", "fshape", "stride", "sparsity", "tied_weights", "pretraining", *WEIGHT_KEYS)
    options = _weights(said, chain) | {"unit_norm": True}
    _add(chain, said, "local", {"maps": said.get("nofm"), **_window(said), **options})


def _pool(kind: str) -> Callable[[Said, Chain], None]:
    def add(said: Said, chain: Chain) -> None:
        _checked(said, "fshape", "stride", "nfm", "nofm", "op", "pad", "activation")
        _add(chain, said, kind, {**_window(said), "padding": said.get("pad")})

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
    """Before the release by a Gaussian window, afterwards by the strength of responses."""
    _checked(said, "ksize", "alpha", "beta", "fshape", "stride", "nfm", "nofm", "activation", *WEIGHT_KEYS)
    if said.get("ksize") is not None:
        _add(
            chain,
            said,
            "lcn",
            {
                "kernel": said.get("ksize"),
                "method": "response",
                "alpha": _number(said, "alpha"),
                "beta": _number(said, "beta"),
            },
        )
    else:
        _add(chain, said, "lcn", {"kernel": _window(said)["kernel"]})


def _response(said: Said, chain: Chain) -> None:
    _checked(said, "ksize", "alpha", "beta", *WEIGHT_KEYS)
    _add(
        chain,
        said,
        "response_norm",
        {"size": said.get("ksize"), "alpha": _number(said, "alpha"), "beta": _number(said, "beta")},
    )


def _number(said: Said, key: str) -> Said | None:
    found = said.get(key)
    return (
        None
        if found is None
        else Said(float(found.value) if isinstance(found.value, int) else found.value, found.where)
    )


def _cross_map_pool(said: Said, chain: Chain) -> None:
    _checked(said, "nofm", *WEIGHT_KEYS)
    rule = next((found for key in RULE_KEYS if (found := said.get(key)) is not None), None)
    if rule is not None:
        chain.rules.append((len(chain.layers), learning_rule(rule)))
    _add(chain, said, "cross_map_pool", {"maps": said.get("nofm")})


def _dropout(said: Said, chain: Chain) -> None:
    _checked(said, "keep")
    _add(chain, said, "dropout", {"keep": said.get("keep") or 0.5})


def _activation(said: Said, chain: Chain) -> None:
    _checked(said, "activation")
    found = said.get("activation")
    ours = activation(found) if found is not None else None
    if ours is not None:
        named = isinstance(ours.value, dict)
        kind = ours.value["name"].value if named else ours.value
        _add(chain, said, kind, {key: item for key, item in ours.value.items() if key != "name"} if named else {})


def _slice(said: Said, chain: Chain) -> None:
    _checked(said, "end_idx", "activation")
    if said.get("end_idx") is None:
        raise ExperimentError(f"{said.where}: {said.kind} needs the key 'end_idx'")
    _add(chain, said, "slice", {"last": said.get("end_idx")})
    if said.get("activation") is not None:
        _activation(at(said.where, {"activation": said.get("activation")}), chain)


def _recurrent(said: Said, chain: Chain) -> None:
    raise ExperimentError(
        f"{said.where}: {said.kind} is not supported: it carries its state from batch to batch. Here a sample is a "
        "sequence: in our format, `dataset: {name: text, length: 20}`, `- lstm: {units: 64}` (or rnn, gru) and "
        "`- linear: 96` predict the next character"
    )


def _boltzmann(said: Said, chain: Chain) -> None:
    raise ExperimentError(
        f"{said.where}: {said.kind} is not supported in the models of neon, which end there. In our format, layers "
        "`- rbm: {units: 500, pretraining: {epochs: 1, lr: 0.1}}` stand before a last `- linear: 10`"
    )


def _nested(kind: str) -> Callable[[Said, Chain], None]:
    def add(said: Said, chain: Chain) -> None:
        _checked(said, "sublayers", *WEIGHT_KEYS)
        found = said.get("sublayers")
        if found is None:
            raise ExperimentError(f"{said.where}: {said.kind} needs the key 'sublayers'")
        inner = convert_layers(found, inner=True)
        chain.rules += [(-1, rule) for _, rule in inner.rules]
        chain.notes += inner.notes
        _add(chain, said, kind, {"layers": inner.layers})

    return add


LAYERS: dict[str, Callable[[Said, Chain], None]] = {
    "DataLayer": _data, "ImageDataLayer": _data, "CostLayer": _cost,
    "FCLayer": _fully_connected, "Layer": _fully_connected, "LayerWithNoBias": _fully_connected,
    "ConvLayer": _convolution, "LocalFilteringLayer": _local_filter,
    "PoolingLayer": _pooling, "MaxPoolingLayer": _pool("max_pool"), "L2PoolingLayer": _pool("l2_pool"),
    "AveragePoolingLayer": _pool("avg_pool"), "LCNLayer": _contrast, "LocalContrastNormLayer": _contrast,
    "CrossMapResponseNormLayer": _response, "CrossMapPoolingLayer": _cross_map_pool, "DropOutLayer": _dropout,
    "RecurrentHiddenLayer": _recurrent, "RecurrentLSTMLayer": _recurrent, "RecurrentOutputLayer": _recurrent,
    "RecurrentCostLayer": _recurrent, "RecurrentLayer": _recurrent, "RBMLayer": _boltzmann, "SliceLayer": _slice,
    "ActivationLayer": _activation, "BranchLayer": _nested("branch"), "ListLayer": _nested("list"),
}  # fmt: skip
