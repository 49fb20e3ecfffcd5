"""`torchmn train --dry-run`, `--quiet` and `--json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import torchmn
from tests.cli.commands import main
from tests.cli.experiments import TEXT, losses, written
from tests.experiment.running import DryRun, dry_run, experiment


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def on_ranks(size: int, mode: str) -> DryRun:
    chosen = experiment(TEXT, f"parallel.mode={mode}")
    return torchmn.run_threads(lambda comm: dry_run(chosen, comm), size)[0]


def test_a_dry_run_computes_the_first_step_and_writes_nothing(tmp_path, capsys):
    file = written(tmp_path)
    assert main(["train", file, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"shapes.yaml"}
    assert [(layer["output"], layer["weights"]) for layer in found["layers"]][:2] == [
        ("3 x 10 x 10", 30),
        ("3 x 10 x 10", 0),
    ]
    assert found["ranks"][0]["inputs"] == [12, 1, 12, 12] and found["samples"] == 12
    assert main(["train", file, "--out", "run", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert found["loss"] == losses(tmp_path / "run")[0]


def test_its_tables_fit_the_terminal(tmp_path, capsys):
    assert main(["train", written(tmp_path), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and "conv1" in "".join(lines) and "mode    1 rank" in lines
    assert [line.split()[0] for line in lines if line.endswith(" MB")] == ["0"]
    assert " 2.7 kB " in "".join(lines), "334 weights in float64"
    conv = next(line for line in lines if line.startswith("conv1"))
    assert conv.endswith(" ...") and conv.removesuffix(" ...").endswith(","), "cut between words"
    assert main(["train", written(tmp_path), "--dry-run", "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_memory_is_that_of_this_rank_in_its_mode():
    weights = 3 * (9 + 1) + (75 * 4 + 4)
    alone = on_ranks(1, "datapar").ranks[0]
    assert (alone.weights, alone.gradients, alone.optimizer) == (8 * weights,) * 3, "float64, with momentum"
    assert alone.activations > 8 * 12 * 12 * 12 and alone.process > 50e6
    halves = on_ranks(2, "datapar").ranks
    assert [use.inputs[0] for use in halves] == [6, 6] and halves[0].weights == alone.weights
    assert 0.4 < halves[0].activations / alone.activations < 0.6
    sharded = on_ranks(2, "modelpar").ranks
    assert [use.inputs[0] for use in sharded] == [12, 12]
    assert sum(use.weights for use in sharded) < 1.1 * alone.weights
    tiles = on_ranks(2, "halopar").ranks
    assert [use.inputs for use in tiles] == [(12, 1, 12, 6)] * 2
    assert all(use.activations < 0.75 * alone.activations for use in tiles)


@pytest.mark.parametrize(("size", "mode"), [(2, "datapar"), (2, "modelpar"), (4, "halopar"), (4, "hybrid")])
def test_the_loss_of_a_dry_run_is_that_of_one_rank(size, mode):
    assert on_ranks(size, mode).loss == pytest.approx(on_ranks(1, "datapar").loss, rel=1e-12)


def test_json_is_one_line_with_the_last_epoch(tmp_path, capsys):
    assert main(["train", written(tmp_path), "--out", "run", "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 and printed.err == ""
    found = json.loads(printed.out)
    assert (found["out"], found["finished"], found["epoch"]) == (str(tmp_path / "run"), True, 2)
    last = [json.loads(line) for line in (Path("run") / "log.jsonl").read_text().splitlines()][-1]
    assert found["test accuracy"] == last["test accuracy"]


def test_json_has_no_nan(tmp_path, capsys):
    file = written(tmp_path)
    diverging = ("optimizer.lr=1e30", "dtype=float32", "model.layers=[linear: 8, linear: 4]")
    values = [word for change in diverging for word in ("--set", change)]
    assert main(["train", file, "--out", "run", "--json", *values]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["test loss"] == "nan"


def test_errors_of_a_dry_run_are_those_of_a_run(tmp_path, capsys):
    file = written(tmp_path)
    assert main(["train", file, "--dry-run", "--set", "predictions=[validation]"]) == 2
    assert "the data set has no validation samples" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["train", file, "--dry-run", "--resume"])
    assert ended.value.code == 2 and "--dry-run does not resume" in capsys.readouterr().err
