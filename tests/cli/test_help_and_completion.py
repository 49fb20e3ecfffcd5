"""Help texts that fit a terminal, suggestions for unknown options, shell completion, and the list of examples."""

from __future__ import annotations

import hashlib
import io
import json
import shlex
import subprocess
import sys
import tarfile

import pytest
from rich.console import Console

from tests.cli.commands import COMMANDS, main
from tests.cli.experiments import TEXT, written
from tests.experiment.running import ModeResult
from torchmn.cli.checks import software
from torchmn.cli.checks.finding import fail, ok
from torchmn.cli.commands import doctor
from torchmn.cli.commands.verify import verify_table
from torchmn.cli.help_layout import fitted
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
    assert max(map(len, out.splitlines())) <= 80


class Terminal(io.StringIO):
    """A terminal that records what is printed."""

    def isatty(self) -> bool:
        return True


def test_messages_are_not_broken_inside_words_or_commands(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with pytest.raises(SystemExit):
        main(["train", "digits.yaml", "--lr", "0.1"])
    assert terminal.getvalue().splitlines() == [
        "torchmn train: unknown argument '--lr'. It is a value of the file: use --set",
        "optimizer.lr=0.1",
        "See `torchmn train --help`.",
    ]
    command = f"torchmn run -n N {'a' * 80}.py"
    line = f"  {'word ' * 20}to start it: {command}"
    assert fitted(f"short\n{line}", terminal).splitlines() == [
        "short", f"  {'word ' * 14}word", f"  {'word ' * 5}to start it:", f"  {command}",
    ]  # fmt: skip
    assert fitted(line, io.StringIO()) == line, "in files, a message is one line"


def test_the_checksum_of_the_download_is_checked_before_it_is_unpacked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = printed(capsys, "new", "cifar10-mlp")[1].partition("curl -O")[2].partition("\n\n")[0].splitlines()[1:]
    with tarfile.open("cifar-10-python.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("cifar-10-batches-py"))
    broken = subprocess.run(["sh", "-c", "\n".join(commands)], capture_output=True, timeout=60)
    assert broken.returncode == 1 and not (tmp_path / "cifar-10-batches-py").exists()
    commands[0] = f"SUM={hashlib.sha256((tmp_path / 'cifar-10-python.tar.gz').read_bytes()).hexdigest()}"
    assert subprocess.run(["sh", "-c", "\n".join(commands)], capture_output=True, timeout=60).returncode == 0
    assert (tmp_path / "cifar-10-batches-py").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_has_every_command_and_its_options(shell, capsys):
    pytest.importorskip("shtab")
    status, script, _ = printed(capsys, "completion", shell)
    assert status == 0 and [name for name in COMMANDS if name not in script] == []
    assert "--halodatapar" in script and "--checkpoint" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ev"], {"evaluate"}),
        (["train", "--halo"], {"--halopar", "--halodatapar"}),
        (["train", "dig"], {"digits.yaml"}),
        (["train", "--transport", ""], {"mpi", "gloo"}),
        (["train", "--out", ""], {"runs"}),
        (["evaluate", "--split", "t"], {"test", "train"}),
        (["evaluate", ""], {"digits.yaml", "runs"}),
        (["new", "mnist-m"], {"mnist-mlp", "mnist-mlp-wide"}),
        (["run", "-n", "2", "dig"], {"digits.yaml"}),
        (["completion", ""], {"bash", "zsh"}),
    ],
)
def test_bash_completes_commands_options_values_and_files(words, found, tmp_path, capsys):
    pytest.importorskip("shtab")
    (tmp_path / "runs").mkdir()
    (tmp_path / "digits.yaml").touch()
    typed = ["torchmn", *words]
    lines = [
        printed(capsys, "completion", "bash")[1],
        f"COMP_WORDS=({' '.join(map(shlex.quote, typed))}) COMP_CWORD={len(words)}",
        "complete_torchmn=$(complete -p torchmn | sed 's/.*-F \\([^ ]*\\).*/\\1/')",
        f"$complete_torchmn torchmn {shlex.quote(typed[-1])} {shlex.quote(typed[-2])}",
        "printf '%s\\n' \"${COMPREPLY[@]}\"",
    ]
    bash = subprocess.run(
        ["bash"], input="\n".join(lines), capture_output=True, text=True, timeout=60, cwd=tmp_path
    )  # fmt: skip
    assert set(bash.stdout.split()) == found, bash.stderr


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
    long = "metrics=[accuracy, {torchmetrics: classification.MulticlassF1Score, average: macro}]"
    lines = printed(capsys, "evaluate", run, "--set", long)[1].splitlines()
    assert len(lines) == 4 and len({line.rindex(" ") for line in lines[1:]}) == 1, "values are below one another"
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
