"""Loading files: layers, initial values, overrides, registered names, and the JSON schema."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
import yaml
from torch import nn

from tests.experiment.files import BASE, swap
from tests.experiment.running import as_yaml, build_model, experiment, json_schema, load_data, plain, read, registry
from torchmn.errors import ArgumentError, ExperimentError
from torchmn.experiment import dump, load, parse_set

DEFAULT_LAYERS = BASE[BASE.index("    - conv") : BASE.index("  cost:")]


def model_of(text: str) -> nn.Module:
    chosen = read("x.yaml", text)
    return build_model(chosen, load_data(chosen, None)["train"])


def test_layers_become_modules_with_inferred_shapes_and_names_of_the_file():
    model = model_of(
        swap("- max_pool: {kernel: 2}", "- conv: {maps: 3, kernel: 3, batch_norm: true}\n    - max_pool: 2")
    )
    assert [name for name, _ in model.named_children()] == [
        "conv1", "conv1_relu", "conv2", "conv2_norm", "max_pool1", "linear1_flatten", "linear1",
    ]  # fmt: skip
    assert model.get_submodule("linear1").in_features == 3 * 11 * 11
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_initial_weights_follow_from_the_seed_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = model_of(BASE), model_of(BASE)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = model_of(BASE + "seed: 1\n")
    assert not torch.equal(first.get_parameter("conv1.weight"), other.get_parameter("conv1.weight"))
    double = model_of(BASE + "dtype: float64\n").get_parameter("conv1.weight")
    assert torch.equal(double.float(), first.get_parameter("conv1.weight"))


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("constant", lambda w: bool((w == 0).all())),
        ("{name: uniform, low: 2.0, high: 3.0}", lambda w: bool((w >= 2).all() and (w < 3).all())),
        ("{name: gaussian, mean: 5.0, std: 0.001}", lambda w: bool((w - 5).abs().max() < 0.01)),
        ("auto_uniform", lambda w: w.abs().max() <= 1 / 5),
        ("glorot", lambda w: w.abs().max() <= (6 / (25 + 100)) ** 0.5),
        ("kaiming", lambda w: 0.15 < w.std() < 0.45),
        ("orthonormal", lambda w: torch.allclose(w.flatten(1) @ w.flatten(1).T, torch.eye(4), atol=1e-5)),
        ("{name: sparse_eigen, sparseness: 3}", lambda w: bool(((w.flatten(1) != 0).sum(1) == 3).all())),
    ],
)
def test_initializers_fill_weights_as_documented(init, expected):
    weight = model_of(swap("activation: relu", f"init: {init}, bias_init: 0.25")).get_submodule("conv1")
    assert expected(weight.weight.detach())
    assert bool((weight.bias == 0.25).all())


def test_bias_init_can_be_the_initializer_of_the_weights():
    model = model_of(swap("activation: relu", "init: {name: uniform, low: 2.0, high: 3.0}, bias_init: init"))
    bias = model.get_parameter("conv1.bias")
    assert bool(((bias >= 2) & (bias <= 3)).all()) and len(bias.unique()) > 1
    with pytest.raises(ExperimentError, match="conv has bias_init: init, which needs an init"):
        read("new.yaml", swap("activation: relu", "bias_init: init"))
    with pytest.raises(ExperimentError, match="expected conv's bias_init to be a number, or `init`"):
        read("new.yaml", swap("activation: relu", "bias_init: zero"))


@pytest.mark.parametrize(
    ("init", "largest"),
    [("glorot", (6 / (4 * 9 + 5 * 9)) ** 0.5), ("auto_uniform", (4 * 9) ** -0.5)],
)
def test_local_filters_are_initialised_at_each_position_like_a_convolution(init, largest):
    layers = f"[conv: {{maps: 4, kernel: 3}}, local: {{maps: 5, kernel: 3, init: {init}}}, linear: 10]"
    weight = model_of(swap("  layers:\n", f"  layers: {layers}\n").replace(DEFAULT_LAYERS, "")).local1.weight
    bounds = weight.detach().abs().flatten(2).amax(dim=2)
    assert bounds.max() <= largest and bounds.min() > 0.8 * largest


def test_orthonormal_local_filters_are_orthonormal_at_each_position():
    layers = "[conv: {maps: 4, kernel: 3}, local: {maps: 5, kernel: 3, init: orthonormal}, linear: 10]"
    weight = model_of(swap("  layers:\n", f"  layers: {layers}\n").replace(DEFAULT_LAYERS, "")).local1.weight
    filters = weight.detach().flatten(0, 1).flatten(2)
    torch.testing.assert_close(filters @ filters.mT, torch.eye(5).expand(len(filters), 5, 5), atol=1e-5, rtol=0)


def test_anchors_aliases_and_merges_work():
    text = """
    imports: []
    dataset: iris
    model:
      layers:
        - linear: &hidden {units: 5, activation: tanh}
        - linear: {<<: *hidden, units: 3}
      cost: &cost cross_entropy
    optimizer: {name: sgd, lr: &rate 1e-2, weight_decay: *rate}
    epochs: 0x2
    batch_size: 10
    """
    chosen = read("x.yaml", text)
    layers = chosen.model.layers or []
    assert [layer.units for layer in layers] == [5, 3]
    assert [layer.activation.kind for layer in layers] == ["tanh", "tanh"]
    assert (chosen.optimizer.lr, chosen.optimizer.weight_decay, chosen.epochs) == (0.01, 0.01, 2)


def test_overrides_win_and_reach_into_lists_and_short_forms():
    text = swap("{name: mnist, sample: 10%}", "mnist")
    changes = ("optimizer.lr=0.5", "dataset.sample=20%", "model.layers.0.conv.maps=7", "seed=3", "metrics=[auc]")
    chosen = experiment(text, *changes)
    assert (chosen.optimizer.lr, chosen.dataset.sample, chosen.seed) == (0.5, 0.2, 3)
    assert chosen.model.layers[0].maps == 7 and chosen.metrics[0].kind == "auc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.lr=fast", "--set optimizer.lr=fast: expected sgd's lr to be a number, got 'fast'"),
        ("optimiser.lr=1", "--set optimiser.lr=1: the file has no key 'optimiser'. Did you mean 'optimizer'?"),
        ("epochs", "--set epochs: expected KEY=VALUE, such as optimizer.lr=0.1"),
        ("epochs.x=1", "--set epochs.x=1: there is no 'epochs.x': epochs is not a mapping"),
        ("model.layers.9=1", "there is no 'model.layers.9': model.layers is a list with indices 0 to 2"),
        ("epochs=[", "--set epochs=[:1:2: invalid YAML"),
    ],
)  # fmt: skip
def test_an_invalid_override_is_reported_with_its_option(change, message):
    with pytest.raises(ExperimentError, match=re.escape(message)):
        experiment(BASE, change)


def test_a_written_experiment_is_read_as_the_same_experiment(tmp_path):
    chosen = experiment(
        BASE, "model.layers.1={dropout: {keep: 0.75}}", "optimizer.momentum={from: 0.1, to: 0.2, end: 3}"
    )
    path = tmp_path / "again.yaml"
    path.write_text(dump(chosen))
    assert dump(load(path)) == dump(chosen)
    assert yaml.safe_load(dump(chosen))["optimizer"]["momentum"] == {"from": 0.1, "to": 0.2, "start": 0, "end": 3}


OWN = """
import torch
import torchmn.experiment as experiment


class Scaled(torch.nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


@experiment.register_layer("scaled_as_a_class")
class ScaledLayer(experiment.Layer):
    factor: float = 3.0

    def build(self, shape):
        assert shape == (4, 24, 24)
        return Scaled(self.factor)


@experiment.register_layer("scaled_as_a_function")
def scaled(shape, *, factor: float):
    return Scaled(factor)


@experiment.register_metric("largest_output")
def largest(activation):
    raise NotImplementedError
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_words.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield
    sys.modules.pop("own_words", None)
    for kind in registry.KINDS:
        for name in [name for name, cls in kind.entries.items() if cls.__module__ == "own_words"]:
            del kind.entries[name]


@pytest.mark.parametrize(
    ("layer", "factor"),
    [
        ("scaled_as_a_class", 3.0),
        ("scaled_as_a_class: {factor: 4.0}", 4.0),
        ("scaled_as_a_function: {factor: 5.0}", 5.0),
        ("module: own_words.Scaled", 2.0),
        ("module: {name: own_words.Scaled, arguments: {factor: 6.0}}", 6.0),
    ],
)
def test_users_can_register_layers(layer, factor, own_module):
    text = "imports: [own_words]\n" + swap("- max_pool: {kernel: 2}", f"- {layer}")
    found = [m.factor for m in model_of(text).modules() if hasattr(m, "factor")]
    assert found == [factor]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("scaled_as_a_function", "x.yaml:6:7: scaled_as_a_function needs the key 'factor'"),
        ("scaled_as_a_class: {factor: big}", "expected scaled_as_a_class's factor to be a number, got 'big'"),
        ("scaled_as_clas", "there is no layer 'scaled_as_clas'. Did you mean 'scaled_as_a_class'?"),
    ],
)
def test_options_of_registered_layers_are_validated(layer, message, own_module):
    with pytest.raises(ExperimentError, match=re.escape(message)):
        model_of("imports: [own_words]\n" + swap("- max_pool: {kernel: 2}", f"- {layer}"))


def test_a_name_can_be_registered_once():
    with pytest.raises(ArgumentError, match="the layer 'conv' is already registered"):
        registry.register_layer("conv")(type("Mine", (registry.Layer,), {}))
    with pytest.raises(ArgumentError, match="expected a class derived from"):
        registry.register_layer("mine")(nn.ReLU)
    with pytest.raises(ArgumentError, match="expected a name such as"):
        registry.register_layer("not a name")(type("Mine", (registry.Layer,), {}))


def test_a_module_can_be_the_whole_model():
    text = BASE[: BASE.index("model:")] + (
        "model:\n  module: {name: torch.nn.Flatten, arguments: {start_dim: 1}}\n  cost: cross_entropy\n"
    ) + BASE[BASE.index("optimizer:") :]  # fmt: skip
    assert isinstance(model_of(text), nn.Flatten)


def test_the_json_schema_has_every_name_and_no_dangling_reference():
    schema = json_schema()
    text = json.dumps(schema)
    for reference in set(re.findall(r'"\$ref": "#/\$defs/([^"]+)"', text)):
        assert reference in schema["$defs"], reference
    for kind in registry.KINDS:
        for name in kind:
            assert f'"{name}"' in json.dumps(schema["$defs"][kind.noun]), name
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"dataset", "model", "optimizer", "epochs", "batch_size"}


def test_a_missing_file_is_reported_with_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExperimentError, match=re.escape(f"digit.yaml: there is no such file in {tmp_path}. ")):
        load("digit.yaml")


def test_a_missing_or_unreadable_file_is_reported_in_one_line(tmp_path):
    (tmp_path / "digits.yaml").write_text(BASE)
    with pytest.raises(ExperimentError, match=r"there is no such file. Did you mean 'digits.yaml'\?"):
        load(tmp_path / "digit.yaml")
    with pytest.raises(ExperimentError, match="torchmn new mnist-cnn"):
        load(tmp_path / "nowhere" / "digit.yaml")
    with pytest.raises(ExperimentError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"epochs: \xff")
    with pytest.raises(ExperimentError, match="expected a text file in UTF-8, got byte 0xff"):
        load(tmp_path / "latin.yaml")


@pytest.mark.parametrize("text", ["1e3", "1E-5", ".5e1", "0x1f", "yes", "1:30", "~", "", "<<", "-1.", "null", "üñí"])
def test_text_that_looks_like_something_else_stays_text(text):
    chosen = experiment(BASE, f"dataset.path='{text}'")
    assert chosen.dataset.path == text
    for written in (dump(chosen), as_yaml(plain(chosen))):
        assert read("again.yaml", written).dataset.path == text
        assert yaml.safe_load(written)["dataset"]["path"] == text  # as other YAML parsers read it


def test_a_value_with_an_equals_sign_is_kept_whole():
    assert parse_set("dataset.path=/a=b").value == "/a=b"
    assert parse_set("x=1e-3").value == 0.001 and parse_set("x=").value is None
