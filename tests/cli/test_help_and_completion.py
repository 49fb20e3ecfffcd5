"""Help texts that fit a terminal, suggestions for unknown options, shell completion, and the list of examples."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from rich.console import Console

from tests.cli.commands import COMMANDS, main
from tests.cli.experiments import TEXT, written
from tests.experiment.running import ModeResult
from torchmn.cli.checks import software
from torchmn.cli.checks.finding import fail, ok
from torchmn.cli.commands import doctor
from torchmn.cli.commands.verify import verify_table
from torchmn.cli.launch import job
from torchmn.experiment.verification import QUANTITIES


def printed(capsys, *arguments: str) -> tuple[int | str | None, str, str]:
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("columns", [80, 72])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal_without_breaking_words(command, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    wide = printed(capsys, *filter(None, [command]), "--help")[1]
    monkeypatch.setenv("COLUMNS", str(columns))
    status, narrow, _ = printed(capsys, *filter(None, [command]), "--help")
    assert status == 0 and narrow.split() == wide.split()
    examples = [line for line in narrow.splitlines() if line.startswith("    ") and "> " in line]  # not wrapped
    assert [line for line in narrow.splitlines() if len(line) > columns and line not in examples] == []


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        (["--lr", "0.1"], "use --set optimizer.lr=0.1\n"),
        (["--lr=0.1"], "use --set optimizer.lr=0.1\n"),
        (["--batch-size", "64"], "use --set batch_size=64\n"),
        (["--batch_size"], "use --set batch_size=VALUE\n"),
        (["--epoch", "3"], "Did you mean '--epochs'?\n"),
        (["--frobnicate"], "unknown argument '--frobnicate'.\n"),
        (["-z"], "unknown argument '-z'.\n"),
        (["--gpus", "2"], "unknown argument '--gpus'. Use -n N instead.\n"),
        (["--nproc-per-node=2"], "Use -n N instead.\n"),
        (["--mode", "halopar"], "Modes are options: use --halopar.\n"),
    ],
)
def test_only_near_options_are_suggested(option, advice, capsys):
    status, _, message = printed(capsys, "train", "x.yaml", *option)
    assert status == 2 and advice in message


def test_new_without_a_name_lists_the_examples(capsys):
    status, out, err = printed(capsys, "new")
    assert (status, err) == (0, "") and "mnist-mlp" in out and "cifar10-cnn" in out


def test_a_new_experiment_comes_with_commands_that_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert printed(capsys, "new", "mnist-mlp")[1].endswith("torchmn train mnist-mlp.yaml -n 2\n")
    out = printed(capsys, "new", "cifar10-cnn")[1]
    assert "sha256sum --check" in out and "torchmn train cifar10-cnn.yaml --data cifar-10-batches-py\n" in out


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_has_every_command_and_its_options(shell, capsys):
    pytest.importorskip("shtab")
    status, script, _ = printed(capsys, "completion", shell)
    assert status == 0 and [name for name in COMMANDS if name not in script] == []
    assert "--halodatapar" in script and "--checkpoint" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=60).returncode == 0


def test_completion_names_the_missing_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, _, message = printed(capsys, "completion", "bash")
    assert status == 2 and "pip install shtab" in message


def test_more_ranks_than_cores_print_one_warning(monkeypatch, capsys):
    monkeypatch.setattr(job, "usable_cores", lambda: 2)
    job.warn_few_cores(2)
    assert capsys.readouterr().err == ""
    job.warn_few_cores(3)
    assert capsys.readouterr().err == "torchmn: 3 ranks share 2 cores: results are the same, but slower\n"


@pytest.mark.parametrize("failed", [False, True])
def test_doctor_prints_its_findings_as_json(failed, monkeypatch, capsys):
    found = [ok("python", "3.11"), *([fail("torch", "missing", "install it")] if failed else [])]
    monkeypatch.setattr(doctor, "findings", lambda names: iter(found))
    status, out, _ = printed(capsys, "doctor", "--json")
    answer = json.loads(out)
    assert status == failed and answer["ok"] is not failed
    assert answer["checks"][0] == {"level": "ok", "check": "python", "found": "3.11", "advice": ""}


def test_doctor_names_a_package_that_exists_on_its_own():
    assert "pip install mpich;" in software.INSTALL_MPI


def test_evaluate_and_predict_need_only_the_directory_of_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file, run = written(tmp_path, TEXT), str(tmp_path / "run")
    assert printed(capsys, "train", file, "--out", run, "--epochs", "1")[0] == 0
    expected = printed(capsys, "evaluate", file, "--checkpoint", run, "--json")
    assert expected[0] == 0 and printed(capsys, "evaluate", run, "--json") == expected
    status, _, _ = printed(capsys, "predict", f"{run}/checkpoints")
    assert status == 0 and (tmp_path / "run" / "predictions-test.npz").is_file()
    status, _, message = printed(capsys, "evaluate", file)
    assert status == 2 and "the directory of the run is missing" in message
    status, _, message = printed(capsys, "evaluate", "missing")
    assert status == 2 and "there is no directory or file 'missing'." in message
    status, _, message = printed(capsys, "train", run)
    assert status == 2 and f"torchmn train {run}/experiment.yaml --resume --out {run}\n" in message
    status, _, message = printed(capsys, "train", str(tmp_path))
    assert status == 2 and "is a directory, not an experiment file" in message
    status, _, message = printed(capsys, "evaluate", str(tmp_path))
    assert status == 2 and "there is no run of `torchmn train`" in message


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["shapes.yaml"], "To train an experiment: torchmn train shapes.yaml\n"),
        (["a script.py"], "To start a script: torchmn run -n N 'a script.py'\n"),
        (["completion", "fish"], "'fish' is not one of bash, zsh\n"),
    ],
)
def test_what_is_no_command_is_answered_with_one(arguments, advice, capsys):
    status, _, message = printed(capsys, *arguments)
    assert status == 2 and advice in message


def test_help_is_a_command_too(capsys):
    assert printed(capsys, "help") == printed(capsys, "--help")
    assert printed(capsys, "help", "train") == printed(capsys, "train", "--help")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "lr=0.1"], "--set lr=0.1: the file has no key 'lr'. Did you mean 'optimizer.lr'?"),
        (["--datapar", "--halopar", "-n", "2"], "only --datapar and --modelpar can be: use --halodatapar"),
        (["--datapar", "--halopar", "--modelpar"], "--datapar and --modelpar and --halopar cannot be combined"),
    ],
)  # fmt: skip
def test_errors_of_values_and_modes_name_what_to_use(arguments, message, tmp_path, capsys):
    status, _, error = printed(capsys, "train", written(tmp_path), *arguments)
    assert status == 2 and message in error


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["train", ""], "FILE"), (["evaluate", ""], "FILE"), (["train", "x.yaml", "--out", ""], "--out"),
     (["predict", "x.yaml", "--checkpoint", ""], "--checkpoint"), (["train", "x.yaml", "--data="], "--data")],
)  # fmt: skip
def test_a_variable_of_the_shell_that_is_not_set_is_an_error(arguments, name, capsys):
    status, _, message = printed(capsys, *arguments)
    assert status == 2 and f"{name} is empty.\n" in message


def test_predictions_that_cannot_be_written_are_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert printed(capsys, "train", written(tmp_path), "--out", "run", "--epochs", "1", "--quiet") == (0, "", "")
    (tmp_path / "run" / "predictions-test.npz").mkdir()
    status, _, message = printed(capsys, "predict", "run")
    assert status == 2 and "predictions-test.npz: cannot be written (Is a directory)" in message


def test_the_table_of_verify_fits_80_columns(tmp_path, monkeypatch, capsys):
    row = ModeResult("halodatapar", "2 x 2 x 2 (data x height x width)", dict.fromkeys(QUANTITIES, 1.2e-12))
    monkeypatch.setenv("COLUMNS", "80")
    table = verify_table([row, ModeResult("hybrid", "2 x 2 (data x vectors)", {}, "too small")])
    Console(highlight=False).print(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert words.count("1.2e-12") == len(QUANTITIES) and {"halodatapar", "possible", "vectors)", "gradients"} <= set(
        words
    )
