"""`torchmn train`, `evaluate` and `predict`: one file, any number of ranks, the same numbers, errors in one line."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests._worlds.launch import ROOT, clean_environment
from tests.cli.commands import PATIENCE, Command, main, started, torchmn
from tests.cli.experiments import TEXT, losses, written
from tests.communicators.test_launchers import HYDRA, OPEN_MPI, SRUN, TORCHRUN
from tests.communicators.test_pmi import PMI2, PMIX
from torchmn.cli.commands.train import command_parser as train_parser
from torchmn.cli.experiment.command import check
from torchmn.cli.experiment.options import command_line
from torchmn.cli.experiment.ranks import launcher_prefix


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(tmp_path: Path, *arguments: str, name: str = "run") -> list[float]:
    """The losses of a run in this process."""
    assert main(["train", written(tmp_path), "--out", str(tmp_path / name), *arguments]) == 0
    return losses(tmp_path / name)


def test_evaluation_and_predictions_of_a_run_agree(tmp_path, capsys, caplog):
    expected = trained(tmp_path)
    assert len(expected) == 8
    printed = capsys.readouterr()
    assert "report  " in printed.out and printed.err == ""
    run, file = str(tmp_path / "run"), str(tmp_path / "shapes.yaml")
    assert main(["evaluate", file, "--checkpoint", run, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert main(["predict", file, "--checkpoint", f"{run}/checkpoints", "--out", "p"]) == 0
    assert "after step" in (printed := capsys.readouterr().out) and printed.endswith("p.npz\n")
    with np.load("p.npz") as predictions:
        assert float((predictions["predicted"] == predictions["targets"]).mean()) == values["accuracy"]
        assert predictions["outputs"].shape == (20, 4)
    last = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()][-1]
    assert last["test accuracy"] == values["accuracy"] and last["test loss"] == pytest.approx(values["loss"])
    assert main(["evaluate", file, "--checkpoint", run, "--split", "train"]) == 0
    printed = capsys.readouterr()
    assert "accuracy" in printed.out and printed.err == "" and caplog.records == []


def test_the_command_to_resume_repeats_all_options():
    flags = "--threads 1 --datapar --modelpar --grid data=2,width=2 --data d --sample 10% --epochs 3 --seed 5"
    arguments = ["x y.yaml", "-n", "4", *flags.split(), "--set", "optimizer.lr=0.1", "--set", "batch_size=8"]
    command = shlex.split(command_line("train", train_parser().parse(arguments)))
    assert command[:2] == ["torchmn", "train"]
    assert vars(train_parser().parse(command[2:])) == vars(train_parser().parse(arguments))


@pytest.mark.parametrize(
    ("environ", "prefix"),
    [
        (HYDRA, "mpiexec -n 4 "),
        (OPEN_MPI, "mpirun -n 6 "),
        (PMI2, "srun --mpi=pmi2 -n 8 "),
        (PMIX, "srun --mpi=pmix -n 8 "),
        ({**SRUN, **HYDRA}, "mpiexec -n 4 "),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "8"}, "torchrun --nproc-per-node 8 --no-python "),
        (
            {**TORCHRUN, **SRUN, "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1"},
            "torchrun --nnodes 2 --nproc-per-node 4 --node-rank NODE --master-addr node1 --master-port 29500 "
            "--no-python ",
        ),
        ({}, ""),
    ],
)
def test_the_command_to_resume_names_the_launcher_that_was_used(environ, prefix, monkeypatch):
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launcher_prefix(train_parser().parse(["shapes.yaml"])) == prefix


def test_resume_auto_begins_a_run_and_continues_it_later(tmp_path, capsys):
    flags = ["--out", str(tmp_path / "run"), "--resume=auto"]
    file = written(tmp_path)
    assert main(["train", file, "--epochs", "1", *flags]) == 0
    assert "resumed" not in capsys.readouterr().out
    assert main(["train", file, *flags]) == 0
    assert "resumed after step 4" in capsys.readouterr().out
    assert losses(tmp_path / "run") == pytest.approx(trained(tmp_path, name="whole"), rel=1e-9)
    assert main(["train", file, *flags]) == 0  # has ended: nothing is left to do
    with pytest.raises(SystemExit):
        main(["train", file, "--resume=auto"])
    assert "--resume=auto needs --out DIR" in capsys.readouterr().err


def test_ranks_that_are_started_give_the_numbers_of_one(tmp_path):
    out = tmp_path / "ranks"
    result = torchmn("train", written(tmp_path), "-n", "2", "--halopar", "--transport", "mpi", "--out", str(out))
    assert (result.status, result.err, result.survivors) == (0, "", []), result.err
    assert "2 ranks, spatial parallel, 2 (width)" in result.out and result.out.count("report  ") == 1
    assert losses(out) == pytest.approx(trained(tmp_path), rel=1e-9)


def test_under_mpiexec_its_ranks_are_used(tmp_path):
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    if mpiexec is None:
        pytest.skip("there is no mpiexec beside this Python")
    command = [mpiexec, "-launcher", "fork", "-n", "2", sys.executable, "-m", "torchmn.cli.main", "train"]
    command += [written(tmp_path), "--datapar", "--out", str(tmp_path / "there")]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("2 ranks, data parallel") == 1
    assert losses(tmp_path / "there") == pytest.approx(trained(tmp_path), rel=1e-9)


def stop_by_ctrl_c(command: Command) -> None:
    os.kill(command.process.pid, signal.SIGINT)


def stop_as_slurm_does_at_the_time_limit(command: Command) -> None:
    """SIGTERM to every process of the job step, twice."""
    family = command.family()
    for process in (*family, *family):
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("stop", "transport", "status"),
    [
        (stop_by_ctrl_c, "gloo", 130),
        (stop_as_slurm_does_at_the_time_limit, "gloo", 143),
        (stop_as_slurm_does_at_the_time_limit, "mpi", 143),
    ],
)
def test_a_signal_saves_a_checkpoint_and_the_printed_command_resumes_exactly(stop, transport, status, tmp_path):
    out, file = tmp_path / "stopped", written(tmp_path)
    flags = ["-n", "2", "--transport", transport, "--epochs", "100000"]
    with started("train", file, *flags, "--out", str(out)) as command:
        deadline = time.monotonic() + PATIENCE
        while not (out / "log.jsonl").exists() or len(losses(out)) < 3:
            assert time.monotonic() < deadline and command.process.poll() is None, command.err
            time.sleep(0.02)
        stop(command)
        result = command.end()
    assert result.status == status and result.survivors == [], result.err
    assert f"to continue: torchmn train {file} {' '.join(flags)} --resume --out {out}" in result.out
    done = len(losses(out))
    assert int(re.search(r"stopped after step (\d+)", result.out)[1]) == done
    epochs = str(done // 4 + 1)
    assert main(["train", file, "--resume", "--out", str(out), "--epochs", epochs]) == 0
    assert losses(out) == pytest.approx(trained(tmp_path, "--epochs", epochs), rel=1e-9)


def test_options_take_precedence_over_the_file(tmp_path, capsys):
    changed = trained(tmp_path, "--epochs", "1", "-r", "5", "--sample", "50%", "--set", "batch_size=8", "--datapar")
    assert len(changed) == 3
    written_down = (tmp_path / "run" / "experiment.yaml").read_text()
    assert "seed: 5" in written_down and "sample: 0.5" in written_down and "mode: datapar" in written_down
    assert "--datapar has no effect on one rank: use -n N" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_training_of_files_whose_names_are_not_utf_8_ends_with_its_report(encoding, tmp_path, monkeypatch):
    odd = os.fsdecode(b"caf\xe9")
    for split, kind in itertools.product(("train", "test"), (odd, "tea")):
        folder = tmp_path / odd / split / kind
        folder.mkdir(parents=True)
        Image.new("L", (4, 4), len(kind)).save(folder / f"{odd}.png")
    text = "dataset: {name: images, size: [12, 12], channels: 1}\n" + TEXT.partition("\n")[2]
    file, out = written(tmp_path, text, f"{odd}.yaml"), tmp_path / f"out-{odd}"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    assert main(["train", file, "--data", str(tmp_path / odd), "--out", str(out)]) == 0
    assert r"caf\udce9" in (out / "report.html").read_text()


def test_without_out_every_run_has_a_new_directory(tmp_path, capsys):
    file = written(tmp_path)
    for name in ("shapes", "shapes-2"):
        assert main(["train", file, "--epochs", "1"]) == 0
        assert (tmp_path / "runs" / name / "report.html").exists()
    assert main(["train", file, "--epochs", "2", "--resume", "--set", "metrics=[log_loss, auc]"]) == 0
    assert len(losses(tmp_path / "runs" / "shapes")) == 4 and len(losses(tmp_path / "runs" / "shapes-2")) == 8


def test_a_neon_file_is_converted_and_trained(capsys):
    old = ROOT / "tests" / "experiment" / "neon_files" / "public-cnn.yaml"
    assert main(["train", str(old), "--epochs", "1", "--out", "old", "-p"]) == 0
    printed = capsys.readouterr()
    assert "is a neon experiment, converted to" in printed.out and "- conv: {maps: 6, kernel: 5" in printed.out
    assert f"{old}:47:12: logging has no effect" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.yaml"], "Did you mean 'shapes.yaml'?"),
        (["train", "broken.yaml"], "broken.yaml:4:7: there is no layer 'cnov'. Did you mean 'conv'?"),
        (["train", "broken.yaml", "-n", "3"], "broken.yaml:4:7: there is no layer 'cnov'. Did you mean 'conv'?"),
        (["train", "shapes.yaml", "-n", "3", "--halodatapar"], "halodatapar needs a number of ranks that is a product"),
        (["train", "shapes.yaml", "-n", "26", "--halopar", "--grid", "26x1"], "26 ranks along height cannot share"),
        (["train", "shapes.yaml", "-n", "4", "--halopar", "--grid", "3x2"], "a grid of height 3 x width 2 has 6 ranks"),
        (["train", "shapes.yaml", "-n", "2", "--halopar", "--grid", "3x3"], "has 9 ranks, and there are 2: use 9 "
         "ranks (-n 9), or --grid 1x2 or --grid 2x1."),
        (["train", "shapes.yaml", "-n", "4", "--halodatapar", "--grid", "3x1"], "(-n 3), or --grid data=2,width=2 or "
         "--grid data=2,height=2."),
        (["train", "shapes.yaml", "-n", "2", "--datapar", "--grid", "2x1"], "datapar has no axis height here"),
        (["train", "shapes.yaml", "--halopar", "--modelpar"], "--modelpar and --halopar cannot be combined"),
        (["train", "shapes.yaml", "--epochs", "many"], "--epochs many: expected epochs to be an integer"),
        (["train", "shapes.yaml", "--sample", "10"], "--sample 10: expected toy_images's sample to be a fraction"),
        (["train", "shapes.yaml", "--out", "shapes.yaml"], "--out "),
        (["train", "shapes.yaml", "--resume", "--out", "none"], "--resume: there is no run in"),
        (["train", "shapes.yaml", "--data", "x", "--set", "dataset=cifar10"], "--data x: "),
        (["evaluate", "shapes.yaml", "--checkpoint", "none"], "--checkpoint none: there are no checkpoints of"),
        (["predict", "shapes.yaml", "--checkpoint", "none", "--out", "no/x.npz"], "--out no/x.npz: cannot be written"),
        (["verify", "broken.yaml"], "broken.yaml:4:7: there is no layer 'cnov'"),
    ],
)  # fmt: skip
def test_errors_are_printed_once_in_one_line_before_ranks_start(arguments, message, tmp_path, capfd):
    written(tmp_path)
    written(tmp_path, TEXT.replace("conv:", "cnov:"), "broken.yaml")
    assert main(arguments) == 2
    printed = capfd.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert "Traceback" not in printed.err and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dataset={name: npz, path: none.npz}", "npz"),
        ("model.layers.0.conv.kernel=40", "conv1"),
    ],
)
def test_errors_of_data_and_model_are_printed_once_by_the_ranks(change, message, tmp_path):
    file = written(tmp_path)
    check(train_parser().parse([file, "-n", "2", "--set", change]), 2, checks_mode=True)
    result = torchmn("train", file, "-n", "2", "--transport", "gloo", "--set", change, warm=True)
    assert result.status == 2 and result.err.count("\n") == 1 and message in result.err, result.err


def test_an_impossible_mode_is_an_error_that_lists_possible_ones(tmp_path):
    text = TEXT.replace("    - linear: 4", "    - reshape: [15, 5]\n    - lstm: {units: 3}\n    - linear: 4")
    file = written(tmp_path, text)
    result = torchmn("train", file, "-n", "2", "--transport", "gloo", "--halopar", warm=True)
    assert result.status == 2 and "Traceback" not in result.err
    assert (
        "halopar is not possible" in result.err and "--datapar" in result.err and result.err.count("not possible") == 1
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], ["FILE"]),
        (["train", "x.yaml", "--halopr"], ["'--halopr'", "Did you mean '--halopar'"]),
        (["train", "x.yaml", "--grid", "2by2"], ["2x2", "'2by2'"]),
        (["train", "x.yaml", "-n", "0"], ["at least 1"]),
        (["train", "x.yaml", "--halopar", "--grid", "2x2"], ["--grid needs 4 ranks, and there is one: use -n 4."]),
        (["train", "train.py"], ["is a script, not an experiment", "torchmn run -n N train.py"]),
        (["run", "-n", "2", "cnn.yaml"], ["is not a Python script", "torchmn train cnn.yaml -n N"]),
        (["new", "mnist"], ["there is no example 'mnist'. Did you mean one of mnist-", "mnist-cnn"]),
        (["evaluate", "x.yaml"], ["no directory or file 'x.yaml'"]),
        (["evaluate", "x.yaml", "--checkpoint", "y", "--split", "tset"], ["'tset'", "Did you mean 'test'"]),
        # What is trained already, or for a few steps, has no use for a number of epochs.
        (["evaluate", "x.yaml", "--checkpoint", "y", "--epochs", "2"], ["unknown argument '--epochs'"]),
        (["predict", "x.yaml", "--checkpoint", "y", "--epochs", "2"], ["unknown argument '--epochs'"]),
        (["verify", "x.yaml", "--epochs", "2"], ["unknown argument '--epochs'"]),
    ],
)
def test_a_wrong_command_line_is_an_error_with_advice(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    message = capsys.readouterr().err
    assert ended.value.code == 2 and [word for word in words if word not in message] == []
