"""neon's other models, data sets and tags: what they mean today, or where their users find the same."""

# ruff: noqa: E501  (a message is one line)

from __future__ import annotations

import pytest

from tests.cli.commands import main
from tests.experiment.neon_experiments import Node, experiment, written
from tests.experiment.running import check, load_data, parse, read, train
from tests.experiment.test_neon import FILES, PUBLIC, edited
from torchmn.errors import ExperimentError
from torchmn.experiment import parse_set

BALANCE = (FILES / "balance.yaml").read_text()


def values(text: str) -> dict:
    return parse("old.yaml", text).document.values


def test_a_balance_network_is_one_list_of_layers_with_three_costs():
    ours = values(BALANCE)["model"]
    assert [next(iter(layer)) for layer in ours["layers"]] == ["linear", "branch", "branch"]
    assert [next(iter(layer)) for layer in ours["layers"][2]["branch"]["layers"]] == ["identity", "list"]
    assert ours["cost"] == [
        {"name": "cross_entropy", "scale": 10.0, "units": [0, 10], "target": "labels", "outputs": "probabilities"},
        {"name": "cross_covariance", "split": 10, "scale": 0.2, "units": [0, 12]},
        {"name": "sum_squared", "units": [12, 796], "target": "inputs"},
    ]
    assert values(BALANCE)["metrics"] == {"test": [{"name": "misclassified_percentage", "units": [0, 10]}]}


def test_a_balance_network_trains_with_the_same_numbers_on_any_ranks():
    chosen = check(parse("old.yaml", BALANCE).document, [parse_set("dataset.sample=2%"), parse_set("dtype=float64")])
    alone, ran = train(chosen), train(chosen, 3, "datapar")
    assert ran.losses == pytest.approx(alone.losses, rel=1e-9)
    assert ran.history[-1] == pytest.approx(alone.history[-1], rel=1e-9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stylelayers: [*data, *hidden, *code", "stylelayers: [*data, *hidden, *class", "old.yaml:13:10: Balance is supported with one BranchLayer"),
        ("classlayers: [*data, *hidden, *class", "classlayers: [*data, *hidden, *code", "the second to last of classlayers must be a layer of the branch"),
        ("classlayers:", "classes:", "Balance has no key 'classes'. Did you mean 'classlayers'?"),
        ("classlayers: [*data, *hidden, *class", "classlayers: [*data, *class", "expected classlayers to begin with aliases of the layers before the BranchLayer"),
        ("blkidx: 10, ", "", "XCovariance needs the key 'blkidx'"),
        ("blkidx: 10, ", "blckidx: 10, ", "XCovariance has no key 'blckidx'. Did you mean 'blkidx'?"),
    ],
)  # fmt: skip
def test_an_unsupported_balance_network_is_an_error(old, new, message):
    assert BALANCE.count(old) == 1, old
    with pytest.raises(ExperimentError) as error:
        read("old.yaml", BALANCE.replace(old, new))
    assert message in str(error.value) and str(error.value).startswith("old.yaml:")


def test_metrics_of_each_split_and_each_rank_are_kept():
    text = edited(
        "test: [ !obj:metrics.MisclassRate {error_rank: 2},",
        "test: [ !obj:metrics.MisclassRate {error_rank: 2}, !obj:metrics.MisclassRate {},",
    )
    assert values(text)["metrics"] == {
        "train": ["log_loss"],
        "test": [{"name": "misclassified", "top": 2}, "misclassified", "log_loss"],
    }
    held_out = edited("sample_pct: 10,", "sample_pct: 10, validation_pct: 20,").replace(
        "train: [ !obj:metrics", "validation: [ !obj:metrics"
    )
    assert values(held_out)["dataset"]["validation"] == "20%" and list(values(held_out)["metrics"]) == [
        "validation",
        "test",
    ]
    without = PUBLIC.read_text().replace("train: [ !obj:metrics", "validation: [ !obj:metrics")
    assert any(
        "metrics of validation have no effect: there are no such samples" in note
        for note in parse("old.yaml", without).notes
    )
    each = edited("num_epochs: 2,", "num_epochs: 2, epoch_metrics: { test: [ !obj:metrics.AUC {}, ], },")
    assert values(each)["metrics"]["test"][-1] == "auc"


def test_defaults_are_those_of_neon():
    assert values(edited("{ low: -0.1, high: 0.1, }", "{}"))["model"]["layers"][0]["conv"]["init"] == {
        "name": "uniform",
        "low": 0.0,
        "high": 1.0,
    }
    relu = values(edited("UniformValGen { low: -0.1, high: 0.1, }", "AutoUniformValGen { relu: True, islocal: True }"))
    assert relu["model"]["layers"][0]["conv"]["init"] == {"name": "auto_uniform", "scale": pytest.approx(2**0.5)}
    rule = "type: rmsprop, lr_params: { learning_rate: 0.001 }"
    text = PUBLIC.read_text()
    start, end = text.index("lrule: &momentum {"), text.index("model: ")
    text = f"{text[:start]}lrule: &momentum {{ {rule} }}, lrule: &slower {{ {rule} }},\n  {text[end:]}"
    assert values(text)["optimizer"] == {"alpha": 0.9, "eps": 1e-6, "name": "rmsprop", "lr": 0.001}
    assert read("old.yaml", text).optimizer.kind == "rmsprop"


def test_a_scale_and_a_slice_are_kept():
    scaled = values(
        edited(
            "transforms.CrossEntropy {}",
            "transforms.CrossEntropy { scale: 1000, epsilon: 0.0005, backend_type: np.float32 }",
        )
    )
    assert scaled["model"]["cost"] == {"name": "cross_entropy", "scale": 1000.0}
    sliced = values(
        edited(
            "!obj:layers.DropOutLayer { name: drop, keep: 0.8, }",
            "!obj:layers.SliceLayer { name: s, end_idx: 3, backend_type: np.float32 }",
        )
    )
    assert sliced["model"]["layers"][2] == {"slice": {"last": 3}}


def test_an_imageset_becomes_a_folder_of_images(tmp_path):
    text = edited(
        "datasets.MNIST {\n    repo_path: '~/no-such-data',\n    sample_pct: 10,",
        f"datasets.Imageset {{\n    repo_path: '~/data', imageset: 'PLANKTON', image_dir: '{tmp_path}', save_dir: '/tmp/b', "
        "macro_size: 1024, output_image_size: 128, cropped_image_size: &c 64, num_channels: 1, square_crop: True,",
    ).replace("ofmshape: [28, 28]", "ofmshape: [64, 64]")
    ours = {"name": "images", "path": str(tmp_path), "size": [64, 64], "channels": 1, "validation": "20%"}
    assert values(text)["dataset"] == {**ours, "subtract": 127.0, "divide": 1.0}
    notes = parse("old.yaml", text).notes
    assert any("without random crops and mirroring" in note for note in notes)
    assert any("macro_size has no effect: there is no ntrain" in note for note in notes)
    normed = text.replace("square_crop: True,", "mean_norm: True, unit_norm: True, ntrain: 24,")
    assert values(normed)["dataset"] == {**ours, "subtract": "mean", "divide": 128.0, "first": 24 * 1024}
    assert values(text.replace("square_crop: True,", "unit_norm: True,"))["dataset"]["divide"] == 256.0
    imagenet = parse("old.yaml", text.replace("PLANKTON", "I1K").replace(f" image_dir: '{tmp_path}',", ""))
    assert "path" not in imagenet.document.values["dataset"]
    assert any("Imageset I1K: neon read ImageNet's archives" in note for note in imagenet.notes)
    assert read("old.yaml", normed).dataset.kind == "images"
    assert values(text)["metrics"] == {"train": ["log_loss"]}
    assert any("metrics of test have no effect: there are no such samples" in note for note in notes)


def test_a_sample_is_of_the_training_images_alone_and_the_flag_wins():
    splits = load_data(read("old.yaml", edited("sample_pct: 10,", "sample_pct: 5,")), None)
    assert {name: len(arrays) for name, arrays in splits.items()} == {"train": 300, "test": 1000}
    splits = load_data(read("old.yaml", PUBLIC.read_text(), [parse_set("dataset.sample=2%")]), None)
    assert {name: len(arrays) for name, arrays in splits.items()} == {"train": 120, "test": 20}


def test_toy_images_are_as_hard_as_those_of_neon():
    """neon expected 0.539 of its sanity check, and got 0.45 to 0.54 by seed: two classes, and two epochs to guess."""
    chosen = read("old.yaml", (FILES / "toy-images.yaml").read_text())
    splits = load_data(chosen, None)
    assert {name: (len(arrays), arrays.shape) for name, arrays in splits.items()} == dict.fromkeys(
        ("train", "test"), (128, (3, 32, 32))
    )
    assert len(splits["train"].classes) == 2
    ran = train(chosen)
    assert 0.45 <= ran.history[-1]["test misclassified"] <= 0.54


@pytest.mark.parametrize(
    ("name", "ours", "shape"),
    [("Housing", "housing", None), ("SPARSENET", "sparsenet", "[16, 16]"), ("MOBYDICK", "text", "[28, 28]")],
)
def test_data_sets_that_need_files_are_found_in_the_old_folder(name, ours, shape, tmp_path):
    (tmp_path / name).mkdir()
    found = experiment(dataset=Node(name, repo_path=tmp_path))
    del found["model"]["layers"][0]
    if shape is not None:
        found["model"]["layers"].insert(0, Node("DataLayer", is_local=True, nofm=1, ofmshape=shape))
    assert values(written(found))["dataset"] == {"name": ours, "path": str(tmp_path / name)}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("models.MLP", "models.RNN", ["old.yaml:30:10: the model RNN is not supported", "dataset: {name: text", "lstm"]),
        ("models.MLP", "models.DBN", ["the model DBN is not supported", "- rbm: {units: 500"]),
        ("layers.DropOutLayer", "layers.RBMLayer", ["old.yaml:38:7: RBMLayer is not supported", "- rbm: {units: 500"]),
        ("layers.DropOutLayer", "layers.RecurrentLSTMLayer", ["RecurrentLSTMLayer is not supported", "- lstm: {units"]),
    ],
)  # fmt: skip
def test_unsupported_models_are_errors_with_an_alternative(old, new, words):
    with pytest.raises(ExperimentError) as error:
        read("old.yaml", edited(old, new))
    assert [word for word in words if word not in str(error.value)] == []


RANGES = edited("keep: 0.8", "keep: !hyperopt share FLOAT 0.5 1").replace(
    "num_epochs: 2,", "num_epochs: !hyperopt nep INT 2 10,"
)


def test_a_range_is_an_error_that_names_the_option_for_its_value():
    with pytest.raises(ExperimentError) as error:
        read("old.yaml", RANGES)
    assert str(error.value).splitlines() == [
        "old.yaml:31:17: !hyperopt nep INT 2 10 is a range, and hyperparameter search is not supported: set a value, such as --set epochs=6",
        "old.yaml:38:52: !hyperopt share FLOAT 0.5 1 is a range, and hyperparameter search is not supported: set a value, such as --set model.layers.2.dropout.keep=0.75",
    ]
    chosen = read("old.yaml", RANGES, [parse_set("epochs=3"), parse_set("model.layers.2.dropout.keep=0.75")])
    assert chosen.epochs == 3 and chosen.model.layers[2].rate == 0.25
    with pytest.raises(
        ExperimentError, match=r"!hyperopt m FLOAT 0 1: hyperparameter search is not supported: write a number"
    ):
        read("old.yaml", edited("coef: 0.9", "coef: !hyperopt m FLOAT 0 1"))


def test_a_file_with_a_range_trains_when_its_value_is_given(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text(RANGES)
    assert main(["convert", "old.yaml"]) == 2 and main(["train", "old.yaml", "--epochs", "1"]) == 2
    assert "--set model.layers.2.dropout.keep=0.75" in capsys.readouterr().err
    flags = ["--sample", "1%", "--epochs", "1", "--set", "model.layers.2.dropout.keep=0.75", "--set", "batch_size=20"]
    assert main(["train", "old.yaml", *flags]) == 0
    assert "- dropout: {keep: 0.75}" in capsys.readouterr().out
