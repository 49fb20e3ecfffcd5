"""Runs of every example and of user-defined models are evaluated and resumed; which user code is executed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.commands import main, starters, torchmn
from tests.cli.experiments import TEXT, losses, written
from tests.experiment.running import registry

LAYERS = TEXT[TEXT.index("  layers:") : TEXT.index("  cost:")]
OWN = """
from torch import nn

import torchmn.experiment as experiment

print("own code runs")


class Net(nn.Sequential):
    def __init__(self, width=8):
        super().__init__(nn.Flatten(), nn.Linear(144, width), nn.ReLU(), nn.Linear(width, 4))


@experiment.register_layer("own_times")
def own_times(shape, factor: float = 2.0):
    return nn.Hardtanh(-factor, factor)


def net():
    return Net()
"""
SMALL = {
    "mnist": ["--sample", "1%", "--set", "batch_size=15"],
    "cifar10": ["--set", "dataset={name: random, shape: [3, 32, 32], train: 20, test: 10}", "--set", "batch_size=10"],
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    (tmp_path / "own_code.py").write_text(OWN)
    yield
    forget()


def forget() -> None:
    """As in a process that has imported nothing of the user's own."""
    sys.modules.pop("own_code", None)
    registry.layers.entries.pop("own_times", None)


def used(file: str, *flags: str, capsys) -> None:
    """Trains, evaluates, predicts and resumes; checks that their numbers agree."""
    assert main(["train", file, "--out", "run", "--epochs", "1", *flags]) == 0, capsys.readouterr().err
    forget()
    capsys.readouterr()
    assert main(["evaluate", file, "--checkpoint", "run", "--json", *flags]) == 0, capsys.readouterr().err
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    row = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()][-1]
    assert values["loss"] == pytest.approx(row["test loss"], rel=1e-5)
    forget()
    assert main(["predict", file, "--checkpoint", "run", "--out", "p.npz", *flags]) == 0, capsys.readouterr().err
    with np.load("p.npz") as predictions:
        assert np.isfinite(predictions["outputs"]).all() and len(predictions["outputs"]) == len(predictions["targets"])
    forget()
    before = Path("run/log.jsonl").read_text()
    assert main(["train", file, "--out", "run", "--epochs", "2", "--resume", *flags]) == 0, capsys.readouterr().err
    after = Path("run/log.jsonl").read_text()
    assert after.startswith(before) and len(after) > len(before)


@pytest.mark.parametrize("name", sorted(starters()))
def test_a_run_of_every_example_is_evaluated_and_resumed(name, capsys):
    assert main(["new", name]) == 0
    used(f"{name}.yaml", *SMALL[name.partition("-")[0]], capsys=capsys)


@pytest.mark.parametrize(
    "model",
    [
        "  module: own_code.Net\n",
        "  module: {name: own_code.Net, arguments: {width: 3}}\n",
        LAYERS.replace("max_pool: 2", "module: {name: torch.nn.MaxPool2d, arguments: {kernel_size: 2}}"),
        LAYERS.replace("dropout: 0.2", "own_times: {factor: 3.0}"),
    ],
    ids=["module", "with arguments", "as a layer", "a word"],
)
def test_a_run_of_a_user_defined_model_is_evaluated_and_resumed(model, tmp_path, capsys):
    text = "imports: [own_code]\nmetrics: []\n" + TEXT.replace(LAYERS, model).replace("metrics: [accuracy]\n", "")
    used(written(tmp_path, text + "predictions: [test]\n"), "--set", "metrics={test: [accuracy]}", capsys=capsys)


# Whose code runs --------------------------------------------------------------------------------------------------


def test_code_of_a_run_directory_is_executed_only_if_its_file_is_named(tmp_path, capsys):
    """The file on the command line has the same model; that of the directory imports, and is not run."""
    file = written(tmp_path)
    assert main(["train", file, "--out", "run", "--epochs", "1"]) == 0
    record = tmp_path / "run" / "experiment.yaml"
    record.write_text(record.read_text().replace("imports: []", "imports: [own_code]"))
    capsys.readouterr()
    for command in ("evaluate", "predict"):
        assert main([command, file, "--checkpoint", "run"]) == 0
    assert main(["train", file, "--out", "run", "--epochs", "2", "--resume"]) == 0
    assert "own code runs" not in capsys.readouterr().out and "own_code" not in sys.modules
    record.write_text(record.read_text().replace("imports: []", "imports: [own_code]"))
    assert main(["evaluate", str(record), "--checkpoint", "run"]) == 0
    assert "own code runs" in capsys.readouterr().out


def test_a_layer_that_only_the_run_directory_imports_is_an_error_with_advice(tmp_path, capsys):
    own = TEXT.replace("dropout: 0.2", "own_times")
    assert main(["train", written(tmp_path, f"imports: [own_code]\n{own}"), "--out", "run", "--epochs", "1"]) == 0
    forget()
    file = written(tmp_path, name="other.yaml")
    capsys.readouterr()
    assert main(["evaluate", file, "--checkpoint", "run"]) == 2
    printed = capsys.readouterr()
    run = tmp_path / "run"
    assert "there is no layer 'own_times'" in printed.err and "own code runs" not in printed.out
    assert f"`imports: ['own_code']` of {run / 'experiment.yaml'} are not executed" in printed.err
    assert f"torchmn evaluate {run / 'experiment.yaml'} --checkpoint {run}" in printed.err
    assert main(["evaluate", str(run / "experiment.yaml"), "--checkpoint", str(run)]) == 0


NOT_CALLED = {
    "subprocess.Popen": ("another class", "{args: [touch, ran]}"),
    "os.system": ("a builtin_function_or_method", "{command: touch ran}"),
    "own_code.net": ("a function", "{}"),
    "own_code.experiment": ("a module", "{}"),
}


@pytest.mark.parametrize("name", NOT_CALLED)
@pytest.mark.parametrize("place", ["model", "layer"])
def test_only_subclasses_of_module_are_called(name, place, tmp_path, capsys):
    what, arguments = NOT_CALLED[name]
    model = f"module: {{name: {name}, arguments: {arguments}}}"
    text = TEXT.replace(LAYERS, f"  {model}\n") if place == "model" else TEXT.replace("max_pool: 2", model)
    assert main(["train", written(tmp_path, text)]) == 2
    assert f"expected {name} to be a subclass of torch.nn.Module, got {what}." in (capsys.readouterr().err)
    assert not (tmp_path / "ran").exists()


def test_converting_a_file_imports_nothing(tmp_path, capsys):
    assert main(["convert", written(tmp_path, f"imports: [own_code]\n{TEXT}")]) == 0
    assert "own code runs" not in capsys.readouterr().out and "own_code" not in sys.modules


def test_files_in_the_working_directory_do_not_shadow_standard_modules(tmp_path, capsys):
    (tmp_path / "wave.py").write_text("raise SystemExit('the wrong wave')")
    sys.modules.pop("wave", None)
    assert main(["train", written(tmp_path, f"imports: [own_code]\n{TEXT}"), "--epochs", "1"]) == 0
    import wave

    assert Path(wave.__file__).parent != tmp_path
    assert main(["train", written(tmp_path, f"imports: [wave]\n{TEXT}"), "--epochs", "1"]) == 2
    assert f"{tmp_path / 'wave.py'} is shadowed by the module wave of" in capsys.readouterr().err


def test_files_in_the_working_directory_do_not_shadow_standard_modules_on_ranks(tmp_path):
    text = f"imports: [own_code]\n{TEXT}"
    for name in ("wave", "difflib", "argparse", "random"):  # what is imported late, and first of all
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the working directory')")
    code = (
        f"import os; os.chdir({str(tmp_path)!r}); from torchmn.cli.main import main; "
        f"raise SystemExit(main(['train', {written(tmp_path, text)!r}, '-n', '2', '--transport', 'gloo', "
        "'--epochs', '1', '--out', 'run']))"
    )
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "start.py"
    script.write_text(code)
    result = torchmn("run", "-n", "1", str(script))
    assert result.status == 0, result.err
    assert len(losses(tmp_path / "run")) == 4
