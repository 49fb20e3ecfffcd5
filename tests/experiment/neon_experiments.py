"""neon experiments for the tests: for each class of `tables.KEYS` one that contains it, and its object there."""

from __future__ import annotations

from typing import Any

from torchmn.experiment.neon.keys.rule_types import RULE_CLASSES
from torchmn.experiment.neon.keys.tables import KEYS, PLAIN_INITIALIZERS
from torchmn.experiment.neon.keys.tables import LAYERS as LAYERS
from torchmn.experiment.neon.keys.tables import MODELS as MODELS


class Node(dict[str, Any]):
    """Keys and values of an object or a plain mapping, as a neon file has them."""

    def __init__(self, kind: str = "", **values: Any):
        super().__init__(values)
        self.kind = kind


def written(value: Any) -> str:
    """Returns the text of a neon file, on one line."""
    if isinstance(value, Node):
        inside = ", ".join(f"{key}: {written(item)}" for key, item in value.items())
        return f"!obj:x.{value.kind} {{{inside}}}" if value.kind else f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return str(value)


def uniform(**more: Any) -> Node:
    return Node("UniformValGen", low=-0.1, high=0.1, **more)


def rule(rate: float = 0.1) -> Node:
    return Node(type="gradient_descent", lr_params=Node(learning_rate=rate))


def layer(kind: str, **values: Any) -> Node:
    return Node(kind, weight_init=uniform(), lrule_init=rule(), **values)


def experiment(*layers: Node, **values: Any) -> Node:
    """A network on MNIST with `layers` between the data and a last layer."""
    every = [
        Node("DataLayer", is_local=True, nofm=1, ofmshape="[28, 28]"),
        *layers,
        layer("FCLayer", nout=10, activation=Node("Logistic")),
        Node("CostLayer", cost=Node("CrossEntropy")),
    ]
    model = Node("MLP", num_epochs=1, batch_size=100, layers=every)
    return Node("FitPredictErrorExperiment", **({"dataset": Node("MNIST"), "model": model} | values))


def balance() -> Node:
    before = "[&data !obj:x.DataLayer {nout: 784}, &hidden !obj:x.FCLayer {nout: 30}"
    branch = "&code !obj:x.BranchLayer {sublayers: [&class !obj:x.FCLayer {nout: 10, activation: !obj:x.Softmax {}}]}"
    costs = [
        f"!obj:x.CostLayer {{{more}cost: !obj:x.{cost}}}"
        for more, cost in (
            ("ref_label: output, ", "SumSquaredDiffs {}"),
            ("", "CrossEntropy {}"),
            ("", "XCovariance {blkidx: 4}"),
        )
    ]
    model = Node(
        "Balance",
        num_epochs=1,
        batch_size=50,
        layers=f"{before}, {branch}, !obj:x.FCLayer {{nout: 784}}, {costs[0]}]",
        classlayers=f"[*data, *hidden, *class, {costs[1]}]",
        stylelayers=f"[*data, *hidden, *code, {costs[2]}]",
    )
    return Node("FitPredictErrorExperiment", dataset=Node("MNIST"), model=model)


def gb(nofm: int = 2) -> Node:
    both = Node(type="gradient_descent_pretrain", lr_params=Node(learning_rate=0.1, pretrain_learning_rate=0.01))
    layers = [
        Node("LocalFilteringLayer", nofm=nofm, fshape="[4, 4]", weight_init=uniform(), lrule_init=both),
        Node("L2PoolingLayer", fshape="[3, 3]"),
        Node("LCNLayer", fshape="[3, 3]"),
        layer("LayerWithNoBias", nout=10, activation=Node("Logistic")),
    ]
    model = Node(
        "GB", num_epochs=2, num_pretrain_epochs=1, num_initial_epochs=1, batch_size=100, pretraining=True, layers=layers
    )
    return Node("FitPredictErrorExperiment", dataset=Node("MNIST"), model=model)


WINDOW = {"fshape": "[3, 3]"}
STRENGTH = {"ksize": 3, "alpha": 0.1, "beta": 0.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "ConvLayer": {"nofm": 4, **WINDOW, "weight_init": uniform(), "lrule_init": rule()},
    "CrossMapPoolingLayer": {"nofm": 4, "weight_init": uniform(), "lrule_init": rule()},
    "PoolingLayer": {"op": "max", **WINDOW},
    **dict.fromkeys(("MaxPoolingLayer", "L2PoolingLayer", "AveragePoolingLayer", "LCNLayer"), WINDOW),
    **dict.fromkeys(("LocalContrastNormLayer", "CrossMapResponseNormLayer"), STRENGTH),
    "SliceLayer": {"end_idx": 1},
    **{name: {"sublayers": "[!obj:x.FCLayer {nout: 5}]"} for name in ("BranchLayer", "ListLayer")},
    **{name: {"nout": 20} for name in ("FCLayer", "Layer", "LayerWithNoBias")},
    "UniformRandom": {"ntrain": 200, "ntest": 100, "nin": 12, "nout": 10},
    "Imageset": {"imageset": "PLANKTON", "image_dir": "/tmp", "cropped_image_size": 32},
    "XCovariance": {"blkidx": 3},
}
"""What the objects need beside the key that a test is about."""


def of_layer(name: str) -> tuple[Node, Node]:
    if name == "LocalFilteringLayer":
        found = gb()
        return found, found["model"]["layers"][0]
    if name in ("DataLayer", "ImageDataLayer", "CostLayer"):
        found = experiment()
        target = found["model"]["layers"][-1 if name == "CostLayer" else 0]
        target.kind = name
        return found, target
    target = Node(name, **OPTIONS.get(name, {}))
    return experiment(target), target


def of_rule(name: str) -> tuple[Node, Node]:
    what, _, kind = name.partition(" of ")
    momentum = Node(type="constant", coef=0.5)
    params = Node(learning_rate=0.1, momentum_params=momentum)
    target = Node(type="gradient_descent_momentum", lr_params=params)
    if name in RULE_CLASSES:
        target = Node(name, lr_params=Node(learning_rate=0.1))
    found = experiment()
    found["model"]["layers"][1]["lrule_init"] = target
    if name == "lr_params of gradient_descent_pretrain":
        found = gb()
        return found, found["model"]["layers"][0]["lrule_init"]["lr_params"]
    if what == "lr_params":
        target["type"] = kind
        target["lr_params"] = target = Node(learning_rate=0.1) if kind != "adadelta" else Node()
    elif what == "momentum_params":
        target = momentum
        changing = {"coef": 0.3, "initial_coef": 0.4, "saturated_coef": 0.9, "start_epoch": 1, "saturate_epoch": 3}
        momentum |= {"type": kind, **(changing if kind == "linear_monotone" else {})}
    elif what == "schedule":
        params["schedule"] = target = Node(type="step", ratio=0.5, step_epochs=2)
    return found, target


def experiment_with(group: str, name: str) -> tuple[Node, Node]:
    """An experiment with an object of the class `name`, and that object."""
    if group == "layers":
        return of_layer(name)
    if group == "learning rules":
        return of_rule(name)
    if name in ("GB", "Balance"):
        found = {"GB": gb, "Balance": balance}[name]()
        return found, found["model"]
    target = Node(name, **OPTIONS.get(name, {}))
    hidden = Node("FCLayer", nout=20, lrule_init=rule())
    found = experiment(hidden)
    if name == "metrics":
        found["metrics"] = target = Node(train=[Node("MSE")], test=[Node("MSE")])
        found["dataset"]["validation_pct"] = 20
        return found, target
    if group == "experiments":
        found.kind = name
        return found, found
    if group == "models":
        found["model"].kind = name
        return found, found["model"]
    if group == "back ends":
        found["backend"] = target
    elif group == "data sets":
        del found["model"]["layers"][0]
        found["dataset"] = target
    elif group == "costs":
        found["model"]["layers"][-1]["cost"] = target
    elif group == "metrics":
        found["metrics"] = Node(test=[target])
    elif group == "activations":
        hidden["activation"] = target
    elif group == "initial weights":
        word = name.removeprefix("weight_init of ")
        if word in PLAIN_INITIALIZERS:
            target = Node(type=word)
        hidden["weight_init"] = target
    return found, target


EVERY = [(group, name, keys) for group, tables in KEYS.items() for name, keys in tables.items()]
"""Each class, with the decisions on its keys."""
