"""What single keys of neon's files mean in numbers: modes, batches, inputs and biases, defaults, initial weights."""

# ruff: noqa: E501  (a message is one line)

from __future__ import annotations

import math

import pytest
import torch

from tests.experiment.neon_experiments import Node, experiment, gb, layer, rule, uniform, written
from tests.experiment.running import build_model, layer_optimizer_options, load_data, read
from tests.experiment.test_neon_keys import converted, refusal


def layers_of(found: Node) -> list:
    return converted(found)[0]["model"]["layers"]


def built(found: Node) -> torch.nn.Module:
    chosen = read("old.yaml", written(found))
    return build_model(chosen, load_data(chosen, None)["train"])


@pytest.mark.parametrize("place", ["dataset", "model"])
def test_the_mode_of_a_data_set_or_a_model_is_the_mode_of_the_run(place):
    found = experiment(dist_flag=True)
    found[place]["dist_mode"] = "halopar"
    assert converted(found)[0]["parallel"] == {"mode": "halopar"}
    found[place]["dist_flag"] = False
    assert "dist_flag is True in FitPredictErrorExperiment, and False in" in refusal(found)
    del found["dist_flag"]
    ours, notes = converted(found)
    assert "parallel" not in ours and any("dist_mode has no effect: dist_flag is False" in note for note in notes)


def test_contradictory_modes_are_an_error():
    found = experiment(dist_flag=True, dist_mode="vecpar")
    found["dataset"]["dist_mode"] = "halopar"
    assert "dist_mode is vecpar in FitPredictErrorExperiment, and halopar in MNIST: they must be the same" in refusal(
        found
    )
    assert "dist_flag: True needs a dist_mode in the data set" in refusal(experiment(dist_flag=True))


@pytest.mark.parametrize(
    ("model", "mode"), [("MLPDist", "modelpar"), ("ConvnetDist", "halopar"), ("GBDist", "halopar")]
)
def test_before_dist_mode_the_model_determines_the_mode(model, mode):
    found = gb() if model == "GBDist" else experiment()
    found["model"].kind = model
    assert "parallel" not in converted(found)[0]
    found["dist_flag"] = True
    ours, notes = converted(found)
    assert ours["parallel"] == {"mode": mode}
    assert any(f"dist_flag: True without dist_mode: {model} is trained in" in note for note in notes)


def test_the_mode_1_of_2014_is_vecpar():
    found = experiment(dist_flag=True)
    found["dataset"]["dist_mode"] = 1
    assert converted(found)[0]["parallel"] == {"mode": "modelpar"}
    found["model"]["dist_mode"] = "vecpar"
    assert converted(found)[0]["parallel"] == {"mode": "modelpar"}
    for other in (0, 2, True):
        found["dataset"]["dist_mode"] = other
        assert f"expected dist_mode to be a string, got '{other}'" in refusal(found)


def test_in_datapar_the_batch_is_that_of_the_data_set():
    found = experiment(dist_flag=True)
    found["dataset"] |= {"dist_mode": "datapar", "batch_size": 300}
    ours, notes = converted(found)
    assert ours["batch_size"] == 300 and any("300, of all ranks together, is used" in note for note in notes)
    del found["dataset"]["batch_size"]
    assert "batch_size 100 is that of one rank in datapar: the data set needs a batch_size" in refusal(found)
    found["dataset"] |= {"dist_mode": "halopar", "batch_size": 300}
    ours, notes = converted(found)
    assert ours["batch_size"] == 100 and any("neon reads it in datapar only" in note for note in notes)


def test_an_additional_input_is_a_bias_initialized_as_the_weights():
    found = experiment(layer("Layer", nin=785, nout=200))
    assert layers_of(found)[0]["linear"] == {
        "units": 200, "bias": True, "init": {"name": "uniform", "low": -0.1, "high": 0.1}, "bias_init": "init",
    }  # fmt: skip
    bias = built(found).get_submodule("linear1").bias
    assert isinstance(bias, torch.Tensor) and 0.09 < bias.abs().max() <= 0.1 and bias.min() < 0 < bias.max()
    assert layers_of(experiment(layer("Layer", nin=784, nout=200)))[0]["linear"]["bias"] is False
    with_number = Node("Layer", nin=785, nout=200, weight_init=uniform(bias_init=0.5))
    assert layers_of(experiment(with_number))[0]["linear"]["bias_init"] == 0.5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (layer("Layer", nin=786, nout=20), "Layer: expected nin to be 784, or 785 with neon's bias, got 786: its inputs have shape 1 x 28 x 28"),
        (layer("LayerWithNoBias", nin=785, nout=20), "LayerWithNoBias: expected nin to be 784, got 785"),
        (layer("FCLayer", nin=785, nout=20), "FCLayer: expected nin to be 784, got 785"),
        (layer("ConvLayer", nifm=3, nofm=2, fshape="[3, 3]"), "ConvLayer: expected nifm to be 1, got 3"),
        (layer("ConvLayer", ifmshape="[32, 32]", nofm=2, fshape="[3, 3]"), "ConvLayer: expected ifmshape to be [28, 28], got [32, 32]"),
        (Node("DataLayer", nout=700), "DataLayer: expected nout to be 1 x 28 x 28, as a sample of the data has 784 values, got 700"),
    ],
)  # fmt: skip
def test_wrong_numbers_of_inputs_are_an_error_with_the_expected_number(wrong, message):
    assert message in refusal(experiment(wrong))


def test_inputs_are_those_of_the_layer_before():
    conv, pool = (
        layer("ConvLayer", nofm=4, fshape="[5, 5]", stride=2),
        Node("PoolingLayer", op="max", fshape="[2, 2]", stride=2),
    )
    right = [conv, pool, Node("DropOutLayer", keep=0.5, nin=144), layer("FCLayer", nin=144, nout=5)]
    ours = experiment(*right)
    ours["model"]["layers"][-2]["nin"] = 5
    assert built(ours)
    ours["model"]["layers"][-2]["nin"] = 7
    assert "expected nin to be 5, got 7: its inputs have shape 5" in refusal(ours)
    of_branch = Node("BranchLayer", sublayers=[Node("FCLayer", nout=3), Node("FCLayer", nout=4)])
    joined = experiment(of_branch)
    joined["model"]["layers"][-2]["nin"] = 8
    assert "expected nin to be 7, got 8" in refusal(joined)


def test_a_vector_becomes_a_square_image_of_one_map():
    found = experiment(layer("FCLayer", nout=36), layer("ConvLayer", nofm=2, fshape="[3, 3]"))
    assert layers_of(found)[1] == {"reshape": {"shape": [1, 6, 6]}}
    assert built(found)
    found["model"]["layers"][1]["nout"] = 35
    assert "ConvLayer needs images, got vectors of 35 values" in refusal(found)


def test_defaults_of_layers_are_those_of_neon():
    found = experiment(Node("FCLayer", nout=20))
    found["model"]["layers"][2].pop("lrule_init")
    ours = converted(found)[0]
    assert ours["optimizer"] == {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    assert ours["model"]["layers"][0]["linear"]["init"] == {"name": "gaussian", "std": 0.01}
    assert ours["metrics"] == {split: ["misclassified_percentage"] for split in ("train", "test")}
    weight = built(found).get_submodule("linear1").weight
    assert isinstance(weight, torch.Tensor) and float(weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    found["model"] |= {"learning_rate": 0.3, "momentum": Node(type="constant", coef=0.5)}
    assert converted(found)[0]["optimizer"] == {"name": "sgd", "lr": 0.3, "momentum": 0.5}


def test_pooling_across_maps_has_its_weights_and_its_activation():
    conv = layer("ConvLayer", nofm=6, fshape="[5, 5]")
    across = Node(
        "CrossMapPoolingLayer",
        nofm=3,
        weight_init=Node("GaussianValGen", scale=0.3),
        activation=Node("Tanh"),
        lrule_init=rule(0.02),
    )
    ours = layers_of(experiment(conv, across))[1]
    assert ours == {
        "conv": {
            "maps": 3,
            "kernel": 1,
            "bias": False,
            "init": {"name": "gaussian", "std": 0.3},
            "activation": "tanh",
            "optimizer": {"lr": 0.02},
        }
    }
    across["weight_init"]["bias_init"] = 0.0
    assert "CrossMapPoolingLayer has no bias: remove bias_init" in refusal(experiment(conv, across))


def test_initial_weights_depend_on_the_shape_of_neons_matrix():
    def init(kind: str, **options: object) -> dict:
        return layers_of(experiment(Node(kind, **options)))[0][{"FCLayer": "linear", "ConvLayer": "conv"}[kind]]["init"]

    auto, glorot = Node("AutoUniformValGen"), Node("NodeNormalizedValGen", scale=2.0)
    window = {"nofm": 16, "fshape": "[3, 3]"}
    assert init("FCLayer", nout=25, weight_init=auto) == {"name": "auto_uniform"}
    assert init("FCLayer", nout=25, weight_init=glorot) == {"name": "glorot", "scale": 2.0}
    assert init("ConvLayer", weight_init=Node("AutoUniformValGen", islocal=True), **window) == {"name": "auto_uniform"}
    assert init("ConvLayer", weight_init=auto, **window) == {"name": "uniform", "low": -0.25, "high": 0.25}
    bound = 2 * math.sqrt(6 / (9 + 16))
    assert init("ConvLayer", weight_init=glorot, **window) == {"name": "uniform", "low": -bound, "high": bound}


@pytest.mark.parametrize(
    ("params", "momentum"),
    [
        ({"initial_coef": 0.99, "saturated_coef": 0.9, "start_epoch": 5, "saturate_epoch": 5}, {"from": 0.99, "to": 0.9, "start": 4, "end": 5}),
        ({"initial_coef": 0.99, "saturated_coef": 0.9, "start_epoch": 0, "saturate_epoch": 0}, 0.9),
        ({"initial_coef": 0.5, "coef": 0.7, "start_epoch": 1, "saturate_epoch": 3}, {"from": 0.5, "to": 0.7, "start": 1, "end": 3}),
        ({"initial_coef": 0.5, "saturated_coef": 0.9, "saturate_epoch": 3}, 0.5),
    ],
)  # fmt: skip
def test_a_momentum_that_changes_is_neons_in_every_epoch(params, momentum):
    found = experiment()
    found["model"]["layers"][1]["lrule_init"] = Node(
        type="gradient_descent_momentum",
        lr_params=Node(learning_rate=0.1, momentum_params=Node(type="linear_monotone", **params)),
    )
    assert converted(found)[0]["optimizer"]["momentum"] == momentum


def test_only_what_a_rule_applies_is_converted():
    found = experiment()
    params = Node(learning_rate=0.1, weight_decay=0.01)
    found["model"]["layers"][1]["lrule_init"] = Node(type="gradient_descent_momentum", lr_params=params)
    ours, notes = converted(found)
    assert ours["optimizer"] == {"name": "sgd", "lr": 0.1}
    assert any("weight_decay has no effect: neon's gradient_descent_momentum ignores it" in n for n in notes)
    found["model"]["layers"][1]["lrule_init"] = Node(type="adadelta", lr_params=Node(learning_rate=0.1))
    assert converted(found)[0]["optimizer"] == {"rho": 0.95, "eps": 1e-6, "name": "adadelta"}


def test_biases_may_have_another_rule_than_weights():
    first = Node("FCLayer", nout=5, weight_init=uniform(bias_init=0.0), lrule_init=rule(0.3), brule_init=rule(0.2))
    found = experiment(first, layer("FCLayer", nout=20))

    def options() -> dict:
        linear = layers_of(found)[0]["linear"]
        return {key: linear[key] for key in ("optimizer", "bias_optimizer") if key in linear}

    assert options() == {"optimizer": {"lr": 0.3}, "bias_optimizer": {"lr": 0.2}}
    first["brule_init"] = rule(0.1)  # of the other layers, hence of the experiment
    assert options() == {"optimizer": {"lr": 0.3}, "bias_optimizer": {}}
    first["lrule_init"] = rule(0.1)
    assert options() == {}
    first["brule_init"] = Node(type="adadelta", lr_params=Node(rho=0.9))
    built_options = layer_optimizer_options(built(found))
    assert list(built_options) == ["linear1.bias"] and built_options["linear1.bias"]["optimizer"].kind == "adadelta"


def test_rules_of_layers_may_be_of_different_kinds():
    """neon's own file with both: gradient_descent_momentum for convolutions, adadelta after them."""
    step = Node(type="step", ratio=0.5, step_epochs=2)
    params = Node(learning_rate=0.1, schedule=step, momentum_params=Node(type="nesterov", coef=0.9))
    moving = Node(type="gradient_descent_momentum", lr_params=params)
    ada = Node(type="adadelta", lr_params=Node(rho=0.9))
    conv = Node("ConvLayer", nofm=4, fshape="[5, 5]", weight_init=uniform(), lrule_init=moving)
    hidden = Node("FCLayer", nout=20, weight_init=uniform(), lrule_init=ada)
    ours = converted(experiment(conv, hidden, Node("FCLayer", nout=20, weight_init=uniform(), lrule_init=ada)))[0]
    assert ours["optimizer"] == {"name": "adadelta", "rho": 0.9, "eps": 1e-6}
    assert ours["model"]["layers"][0]["conv"]["optimizer"] == {
        "name": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "schedule": {"every": 2, "ratio": 0.5, "shift": 1},
    }
    assert ours["model"]["layers"][3]["linear"]["optimizer"] == {"name": "sgd", "lr": 0.1}


def test_the_classifier_of_a_sparse_autoencoder_may_have_a_rule_of_another_kind():
    found = gb()
    found["model"]["layers"][-1]["lrule_init"] = Node(type="adadelta", lr_params=Node(rho=0.9))
    assert converted(found)[0]["model"]["autoencoder"]["classifier"] == {"name": "adadelta", "rho": 0.9, "eps": 1e-6}
    built(found)


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        (0, "weight_init", Node("GaussianValGen"), "LocalFilteringLayer: expected weight_init to be uniform with low = -high"),
        (0, "activation", Node("Tanh"), "LocalFilteringLayer: expected the activation to be Linear in GB"),
        (0, "ifmshape", "[27, 27]", "LocalFilteringLayer: expected ifmshape to be [28, 28], got [27, 27]"),
        (3, "nin", 1000, "LayerWithNoBias: expected nin to be 1058, got 1000: its inputs have shape 2 x 23 x 23"),
        (3, "activation", Node("Tanh"), "the classifier of GB is supported with activation: logistic, got tanh"),
        (3, "weight_init", Node("GaussianValGen"), "the classifier of GB is supported with init:"),
    ],
)  # fmt: skip
def test_unsupported_options_of_the_sparse_autoencoder_are_errors(place, key, value, message):
    found = gb()
    converted(found)
    found["model"]["layers"][place][key] = value
    assert message in refusal(found)


def test_a_key_of_an_experiment_is_known_or_defines_anchors_in_use():
    held = (
        written(experiment())
        .replace("dataset: ", "held: [&bs 100], dataset: ", 1)
        .replace("batch_size: 100", "batch_size: *bs")
    )
    assert read("old.yaml", held).batch_size == 100
    assert (
        "FitPredictErrorExperiment has no key 'metrcs', and no alias refers to it. Did you mean 'metrics'?"
        in refusal(experiment(metrcs=Node(test=[])))
    )
    unused = converted(experiment(lrule=rule()))[1]
    assert [note for note in unused if "lrule has no effect: no alias refers to it" in note]


def test_a_replaced_key_has_no_effect_next_to_the_new_one():
    found = experiment(inference_sets="[train]", metrics=Node(test=[Node("AUC")]))
    ours, notes = converted(found)
    assert ours["metrics"] == {"test": ["auc"]}
    assert any("inference_sets has no effect: metrics replaces it" in note for note in notes)


def test_of_a_duplicate_key_the_last_one_counts_and_the_first_is_noted():
    found = experiment()
    found["model"]["layers"][1]["nout"] = "11, nout: 10"
    ours, notes = converted(found)
    assert ours["model"]["layers"][-1]["linear"]["units"] == 10
    assert any("nout has no effect: the same key follows at old.yaml:1:" in note for note in notes)


def test_a_learning_rate_of_a_layer_has_the_momentum_of_the_model():
    found = experiment(Node("Layer", nout=20, nin=785, weight_init=uniform(), learning_rate=0.2))
    found["model"] |= {"learning_rate": 0.3, "momentum": Node(type="constant", coef=0.5)}
    found["model"]["layers"][2].pop("lrule_init")
    ours, notes = converted(found)
    assert ours["model"]["layers"][0]["linear"]["bias"] is True
    assert ours["optimizer"] == {"name": "sgd", "lr": 0.2, "momentum": 0.5}
    assert ours["model"]["layers"][1]["linear"]["optimizer"] == {"lr": 0.3}
    assert not any("no effect" in note for note in notes)
    found["model"]["layers"][1]["learning_rule"] = rule()
    assert any("learning_rate has no effect: the layer has a learning rule" in note for note in converted(found)[1])


def test_rules_of_layers_may_differ_in_momentum_also_inside_a_branch():
    ramp = Node(type="linear_monotone", initial_coef=0.99, saturated_coef=0.9, start_epoch=5, saturate_epoch=5)
    moving = Node("GradientDescentMomentum", name="m", lr_params=Node(learning_rate=0.1, momentum_params=ramp))
    parts = [layer("FCLayer", nout=4), Node("FCLayer", nout=5, weight_init=uniform(), lrule_init=moving)]
    found = experiment(Node("BranchLayer", sublayers=parts), layer("FCLayer", nout=20))
    ours = converted(found)[0]
    left, right = ours["model"]["layers"][0]["branch"]["layers"]
    assert "optimizer" not in left["linear"]
    assert right["linear"]["optimizer"] == {"momentum": {"from": 0.99, "to": 0.9, "start": 4, "end": 5}}
    groups = layer_optimizer_options(built(found))
    assert sorted(name for name, options in groups.items() if options["momentum"] == 0.99) == [
        "branch1.branches.1.linear1.weight"
    ]


def test_maxout_is_the_maximum_over_windows_and_maps():
    conv = layer("ConvLayer", nofm=6, fshape="[5, 5]")
    pool = Node("PoolingLayer", op="max", fshape="[2, 2]", stride=2, maxout=3)
    model = built(experiment(conv, pool))
    x = torch.rand(2, 1, 28, 28)
    maps = model.get_submodule("conv1")(x)
    expected = torch.nn.functional.max_pool2d(maps, 2, 2).unflatten(1, (2, 3)).amax(dim=2)
    torch.testing.assert_close(model.get_submodule("linear1")(expected.flatten(1)).sigmoid(), model(x))
    pool["maxout"] = 4
    assert "PoolingLayer: expected maxout to divide the number of maps, which is 6, got 4" in refusal(
        experiment(conv, pool)
    )
    pool |= {"op": "avg", "maxout": 3}
    assert "maxout needs op: max" in refusal(experiment(conv, pool))


def test_an_autoencoder_with_a_cost_reconstructs_its_input():
    inner = [layer("AELayer", nin=784, nout=20), layer("AELayer", nin=20, nout=784)]
    model = Node("Autoencoder", num_epochs=1, batch_size=100, cost=Node("SumSquaredDiffs"), layers=inner)
    found = experiment(model=model)
    ours = converted(found)[0]
    assert ours["model"]["target"] == "inputs" and "metrics" not in ours
    assert all(each["linear"]["bias"] is False for each in ours["model"]["layers"])
    assert built(found)


def test_classes_with_a_b_are_those_without():
    """neon had FCLayerB and others beside its older layers, before they replaced these."""
    found = experiment(layer("FCLayer", nout=20))
    expected = converted(found)[0]
    for each in found["model"]["layers"]:
        each.kind += "B"
    assert converted(found)[0] == expected
    found["model"]["layers"][1]["weight_init"] = Node(type="autoscale", relu=1, bias_init=0.0)
    assert layers_of(found)[0]["linear"]["init"] == {"name": "auto_uniform", "scale": pytest.approx(2**0.5)}


def test_modelpar_is_the_mode_vecpar():
    found = experiment(dist_flag=True, dist_mode="modelpar")
    found["dataset"]["dist_mode"] = "vecpar"
    assert converted(found)[0]["parallel"] == {"mode": "modelpar"}


def test_the_data_set_may_be_in_the_model_or_the_data_layer():
    found = experiment()
    found["model"]["layers"][0] = Node("DataLayer", dataset=Node("CIFAR10", sample_pct=20))
    del found["dataset"]
    assert converted(found)[0]["dataset"] == {"name": "cifar10", "train_sample": "20%"}
    found["model"]["layers"][1]["nin"] = 3072
    converted(found)
    found["model"]["dataset"] = Node("MNIST")
    assert "expected dataset to be that of the experiment, MNIST, got CIFAR10" in refusal(found)


def test_a_cross_entropy_of_values_that_are_not_probabilities_is_an_error():
    found = experiment(layer("FCLayer", nout=20))
    last = found["model"]["layers"][-2]
    for activation in ("Logistic", "Softmax"):
        last["activation"] = Node(activation)
        converted(found)
    last["activation"] = Node("Tanh")
    assert "CrossEntropy: expected the activation of FCLayer before it to be Logistic or Softmax, got Tanh" in refusal(
        found
    )
    del last["activation"]
    assert "got none: neon takes logarithms of its outputs" in refusal(found)
    found["model"]["layers"].insert(-1, Node("ActivationLayer", activation=Node("Logistic")))
    converted(found)
    found["model"]["layers"][-1]["cost"] = Node("SumSquaredDiffs")
    del found["model"]["layers"][-2]
    converted(found)


def test_inference_sets_are_the_splits_of_the_metrics():
    assert converted(experiment(inference_sets="[test]"))[0]["metrics"] == {"test": ["misclassified_percentage"]}
    several = experiment(
        inference_sets="[train, validation]", inference_metrics="[!obj:x.AUC {}, !obj:x.LogLossMean {}]"
    )
    ours, notes = converted(several)
    assert ours["metrics"] == {"train": ["auc", "log_loss"]}
    assert any("metrics of validation have no effect: there are no such samples" in note for note in notes)


def test_an_autoencoder_without_rules_has_the_default_rule():
    found = gb()
    for each in found["model"]["layers"]:
        each.pop("lrule_init", None)
    ours = converted(found)[0]
    assert ours["optimizer"] == {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    assert ours["model"]["autoencoder"]["pretraining"] == {"epochs": 1, "lr": 0.1}


def test_half_precision_and_fixed_point_are_float32_with_a_note():
    found = experiment(backend=Node("FixedPoint", default_dtype=Node("fixpt_dtype", int_bits=5)))
    found["model"]["backend_type"] = "np.float16"
    ours, notes = converted(found)
    assert "dtype" not in ours
    assert any("the back end FixedPoint has no effect: numbers are float32 here" in note for note in notes)
    assert any("backend_type has no effect: numbers are float32 here" in note for note in notes)
    found["model"]["backend_type"] = "np.float64"
    assert "float64 with `dtype: float64`" in refusal(found)
