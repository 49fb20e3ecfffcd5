"""Every key of every neon class changes the experiment, is an error, or is a note with a reason."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.docs.pages import page
from tests.experiment.neon_experiments import (
    EVERY,
    Node,
    balance,
    experiment,
    experiment_with,
    gb,
    layer,
    rule,
    uniform,
    written,
)
from tests.experiment.neon_vocabulary import CLASSES, MAPPINGS
from tests.experiment.running import parse
from torchmn.errors import ExperimentError
from torchmn.experiment.neon import data, layers
from torchmn.experiment.neon.keys import tables
from torchmn.experiment.neon.keys.pages import ignored_table, used_table
from torchmn.experiment.neon.terms import values

PLACE = re.compile(r"old\.yaml:\d+:\d+: ")


@functools.cache
def of_text(text: str) -> tuple[Any, list[str]]:
    parsed = parse("old.yaml", text)
    return parsed.document.values, parsed.notes


def converted(found: Node) -> tuple[Any, list[str]]:
    return of_text(written(found))


def outcome(found: Node) -> tuple[Any, str]:
    """Returns the converted experiment, or None and the error."""
    try:
        return converted(found)[0], ""
    except ExperimentError as error:
        return None, str(error)


def refusal(found: Node) -> str:
    with pytest.raises(ExperimentError) as error:
        converted(found)
    return str(error.value)


FEWER = Node(type="gradient_descent", lr_params=Node(learning_rate=0.02))
RAMP = Node(type="linear_monotone", initial_coef=0.5, saturated_coef=0.9, start_epoch=1, saturate_epoch=3)
TANH = Node("Tanh")
# Another value for each key that is read. A class in front where the key means something else there.
OTHER: dict[str, Any] = {
    "dataset": Node("MNIST", sample_pct=50),
    "model": Node("MLP", num_epochs=3, batch_size=20, layers=experiment()["model"]["layers"]),
    "datasets": [Node("MNIST", sample_pct=50)], "backend": Node("CPU", rng_seed=7), "metrics": Node(test=[Node("AUC")]),
    "predictions": "[test]", "inference_sets": "[test]", "inference_metrics": "[!obj:x.AUC {}]", "maxout": 3,
    "dist_flag": True, "dist_mode": "halopar", "rng_seed": 5, "num_epochs": 7,
    "batch_size": 25,
    "layers": experiment(layer("FCLayer", nout=33))["model"]["layers"], "cost": Node("SumSquaredDiffs"),
    "epoch_metrics": Node(test=[Node("AUC")]), "learning_rate": 0.3, "momentum": RAMP, "momentum_params": RAMP,
    "classlayers": "[]", "stylelayers": "[]", "pretraining": False, "num_pretrain_epochs": 3, "num_initial_epochs": 2,
    "repo_path": "/tmp", "sample_pct": 20, "validation_pct": 20, "coarse_labels": True, "test_pct": 30, "unrolls": 7,
    "ntrain": 30, "ntest": 30, "imageset": "FLOWERS", "image_dir": "/", "nin": 13,
    "cropped_image_size": 16, "output_image_size": 16, "num_channels": 1, "mean_norm": True, "unit_norm": True,
    "Imageset.ntrain": 2, "macro_size": 64, "ref_label": "output", "nout": 11,
    "weight_init": Node("GaussianValGen", scale=0.3), "learning_rule": FEWER, "lrule_init": FEWER,
    "brule_init": FEWER, "activation": TANH,
    "batch_norm": True, "nofm": 6, "fshape": "[5, 5]", "stride": 2, "pad": 1, "local_conv": True, "sparsity": 0.2,
    "tied_weights": False, "op": "avg", "ksize": 5, "alpha": 0.2, "beta": 0.25, "keep": 0.7, "end_idx": 2,
    "sublayers": "[!obj:x.FCLayer {nout: 6}]", "scale": 3, "blkidx": 4, "error_rank": 2, "slope": 0.2, "low": -0.3,
    "high": 0.3, "bias_init": 0.5, "relu": True, "is_local": True, "islocal": True, "loc": 0.5, "sparseness": 4,
    "eigenvalue": 0.9, "type": "adadelta", "lr_params": Node(learning_rate=0.7), "weight_decay": 0.01, "rho": 0.5,
    "pretrain_learning_rate": 0.5, "schedule": Node(type="step", ratio=0.5, step_epochs=2), "epsilon": 0.01,
    "gamma": 0.5, "coef": 0.7, "initial_coef": 0.8, "saturated_coef": 0.6, "start_epoch": 2, "saturate_epoch": 4,
    "ratio": 0.2, "step_epochs": 3,
    "AdaDelta.lr_params": Node(rho=0.5), "schedule.type": "power", "momentum_params of constant.type": "nesterov",
    "momentum_params of nesterov.type": "constant", "momentum_params of linear_monotone.type": "constant",
    "Balance.layers": balance()["model"]["layers"].replace("nout: 30", "nout: 31"),
    "GB.layers": gb(nofm=3)["model"]["layers"],
    "train": "[!obj:x.AUC {}]", "test": "[!obj:x.AUC {}]", "validation": "[!obj:x.AUC {}]",
    **{f"weight_init of {word}.type": "gaussian" for word in ("uniform", "node_normalized", "sparse_eigenval")},
    "weight_init of gaussian.type": "uniform", "weight_init of normal.type": "uniform",
    "weight_init of autoscale.type": "gaussian",
}  # fmt: skip
# Values that a checked key must not have, and one that it may have, in the experiment of its class.
WRONG: dict[str, Any] = {
    "batch_size": 99, "nin": 800, "nifm": 2, "ifmshape": "[27, 28]", "nfm": 2, "nofm": 2, "ofmshape": "[27, 28]",
    "nout": 783, "is_local": False, "ref_layer": Node("FCLayer", nout=3), "shared_bias": False,
    "cost": Node("SumSquaredDiffs"), "pretrain_cost": Node("CrossEntropy"),
    "dataset": Node("MNIST", sample_pct=30), "olayer": Node("FCLayer", nout=3), "deserialized_path": "/tmp",
    "depickle": "/tmp",
}  # fmt: skip
RIGHT: dict[str, Any] = {
    "batch_size": 100, "nin": 784, "nifm": 1, "ifmshape": "[28, 28]", "nfm": 1, "nofm": 1, "ofmshape": "[28, 28]",
    "nout": 784, "is_local": True, "ref_layer": Node("DataLayer", nout=784), "shared_bias": True,
    "cost": Node("CrossEntropy"), "pretrain_cost": Node("SumSquaredDiffs"),
    "CostLayer.nin": 10, "dataset": Node("MNIST"), "deserialized_path": "/no/such/file.pkl",
    "depickle": "/no/such/file.pkl",
    "olayer": layer("FCLayer", nout=10, activation=Node("Logistic")),
}  # fmt: skip
# Other keys that a key needs to be read.
BESIDE: dict[str, dict[str, Any]] = {
    "brule_init": {"weight_init": uniform(bias_init=0.0), "lrule_init": rule(0.1)},
    "shared_bias": {"weight_init": uniform(bias_init=0.0)},
    "macro_size": {"ntrain": 1, "macro_size": 32},
}  # fmt: skip


def of(values: dict[str, Any], name: str, key: str) -> Any:
    found = values.get(f"{name}.{key}", values.get(key))
    assert found is not None, f"{name}.{key} has no value in this test: which one shows that it is read?"
    return found


def complete(found: Node, target: Node, group: str, name: str, key: str) -> None:
    """Puts beside the key what it needs to be read, and takes away what is read in its place."""
    target |= BESIDE.get(key, {})
    elsewhere = found if target is not found else found["dataset"]
    if key == "dist_flag":
        elsewhere["dist_mode"] = "halopar"
    elif key == "dist_mode":
        elsewhere |= {"dist_flag": True, "dist_mode": "vecpar"}
    elif key == "datasets":
        found["datasets"] = [found.pop("dataset")]
    elif key == "learning_rule":
        target["learning_rule"] = target.pop("lrule_init", rule())
    elif group == "layers" and key == "learning_rate":
        target.pop("lrule_init", None)
    elif key == "initial_coef" and name != "momentum_params of linear_monotone":
        target["initial_coef"] = target.pop("coef")
    elif key == "coef" and name == "momentum_params of linear_monotone":
        del target["initial_coef"]
    elif group == "data sets" and key == "batch_size":
        found |= {"dist_flag": True, "dist_mode": "datapar"}
        target["batch_size"] = 300
    elif name == "Imageset" and key in ("repo_path", "imageset"):
        del target["image_dir"]
        target["repo_path"] = "/"
    elif name == "Imageset" and key == "ntrain":
        target["macro_size"] = 32
    elif name == "Imageset" and key == "output_image_size":
        target["output_image_size"] = target.pop("cropped_image_size")
    elif group == "models" and key == "cost" and name != "GB":
        target["cost"] = target["layers"].pop()["cost"]
    elif group == "models" and key in ("learning_rate", "momentum", "momentum_params"):
        target["learning_rate"] = 0.2
        for each in target["layers"] if isinstance(target["layers"], list) else ():
            each.pop("lrule_init", None)


def classes_with(decision: str) -> Any:
    """Runs a test for each class with such a key."""
    each = [(group, name) for group, name, keys in EVERY if getattr(keys, decision, True)]
    return pytest.mark.parametrize(("group", "name"), each, ids=[name.replace(" ", "-") for _, name in each])


@classes_with("read")
def test_a_key_that_is_read_changes_the_experiment(group, name):
    for key in tables.KEYS[group][name].read:
        found, target = experiment_with(group, name)
        complete(found, target, group, name, key)
        before, _ = converted(found)
        target[key] = of(OTHER, name, key)
        after, message = outcome(found)
        assert after != before, key
        assert after is not None or (PLACE.match(message) and (key in message or str(target[key]) in message)), message


@classes_with("checked")
def test_a_checked_key_has_the_expected_value_or_is_an_error(group, name):
    for key in tables.KEYS[group][name].checked:
        found, target = experiment_with(group, name)
        complete(found, target, group, name, key)
        if name in ("DataLayer", "ImageDataLayer") and key == "nout":
            target.clear()
            target["nout"] = 784
        before, _ = converted(found)
        target[key] = of(RIGHT, name, key)
        assert converted(found)[0] == before, key
        target[key] = of(WRONG, name, key)
        message = refusal(found)
        assert PLACE.match(message) and key in message


@classes_with("only")
def test_a_value_that_is_not_allowed_is_an_error(group, name):
    for key, only in tables.KEYS[group][name].only.items():
        found, target = experiment_with(group, name)
        before, _ = converted(found)
        target[key] = only.values[0]
        assert converted(found)[0] == before, key
        for value in only.replaced:
            target[key] = Node(value) if str(value).endswith("pt_dtype") else value
            after, notes = converted(found)
            assert after == before, key
            assert [note for note in notes if PLACE.match(note) and f": {key} has no effect: {only.note}" in note], key
        simple = isinstance(only.values[0], bool) and not only.replaced
        target[key] = not only.values[0] if simple else "np.float64"
        message = refusal(found)
        assert PLACE.match(message) and key in message and only.reason in message


@classes_with("ignored")
def test_a_key_without_effect_is_a_note_with_position_and_reason(group, name):
    for key, reason in tables.KEYS[group][name].ignored.items():
        found, target = experiment_with(group, name)
        target.pop(key, None)
        before, _ = converted(found)
        target[key] = 3
        after, notes = converted(found)
        assert after == before, key
        assert [note for note in notes if PLACE.match(note) and f": {key} has no effect: {reason}" in note], key


@classes_with("refused")
def test_an_unsupported_key_is_an_error_with_its_position(group, name):
    for key, reason in tables.KEYS[group][name].refused.items():
        found, target = experiment_with(group, name)
        target[key] = 3
        message = refusal(found)
        assert PLACE.match(message) and repr(key) in message and reason in message


@classes_with("itself")
def test_an_unknown_key_is_an_error(group, name):
    found, target = experiment_with(group, name)
    target["share_mask"] = 3
    message = refusal(found)
    assert PLACE.match(message) and "has no key 'share_mask'" in message


def test_each_class_that_is_read_has_a_table():
    refused = {name for name in layers.LAYERS if name.startswith(("Recurrent", "RBM"))}
    assert set(tables.LAYERS) == set(layers.LAYERS) - refused
    assert set(tables.DATASETS) == set(data.DATASETS)
    assert set(tables.COSTS) == set(values.COSTS) and set(tables.METRICS) == set(values.METRICS)
    assert set(tables.ACTIVATIONS) == set(values.ACTIVATIONS)
    assert set(tables.INITIALIZERS) == set(values.INITIALIZERS) - {"IdentityValGen"}
    names = [name for group in tables.KEYS.values() for name in group]
    assert len(names) == len(set(names))
    for group in tables.KEYS.values():
        for name, keys in group.items():
            assert len(keys.all) == len(set(keys.all)), f"{name} has two decisions on a key"


def test_every_key_of_neons_files_has_a_decision():
    decisions = {name: keys.all for group in tables.KEYS.values() for name, keys in group.items()}
    of_experiments = {name: (*decisions[name], *tables.ANCHOR_KEYS) for name in tables.EXPERIMENTS}
    decisions |= of_experiments | dict.fromkeys(("fixpt_dtype", "flexpt_dtype"), ())  # values of keys of types
    for name, keys in CLASSES.items():
        if name in NOT_CONVERTED:
            assert name not in decisions and f"{name} is not supported" in refusal(with_class(name))
        elif decisions[name.removesuffix("Dist")]:
            assert set(keys.split()) <= set(decisions[name.removesuffix("Dist")]), name
    for mapping, keys in MAPPINGS.items():
        tables_of = [keys for name, keys in decisions.items() if name.partition(" of ")[0] == mapping]
        assert tables_of and all(set(keys.split()) <= set(found) for found in tables_of), mapping


NOT_CONVERTED = (
    *("RBM", "DBN", "RNN", "I1K", "NDSB", "Hurricane", "RBMLayer", "RecurrentHiddenLayer", "RecurrentLSTMLayer"),
    *("RecurrentOutputLayer", "RecurrentCostLayer"),
)


def with_class(name: str) -> Node:
    if name.endswith("Layer"):
        return experiment(Node(name, nout=3))
    if name in ("I1K", "NDSB", "Hurricane"):
        return experiment(dataset=Node(name))
    found = experiment()
    found["model"].kind = name
    return found


def test_the_guide_has_the_tables_of_keys():
    assert ignored_table(tables.KEYS) in page("from-neon.md")
    assert used_table(tables.KEYS) in page("from-neon.md")
