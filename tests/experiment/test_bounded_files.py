"""Files that exceed the size limits raise an error quickly, wherever YAML is read."""

from __future__ import annotations

import os

import pytest

from tests.cli.commands import main
from tests.experiment.files import BASE
from tests.experiment.running import RunDirectory, experiment, parse, read
from torchmn.errors import ExperimentError
from torchmn.experiment import parse_set
from torchmn.experiment.file.document import MAX_CHARACTERS, MAX_DEPTH, MAX_VALUES, compose, document

LEVELS = 14  # 10**14 values when expanded
pytestmark = pytest.mark.timeout(120)


def nested(first: str, more: str) -> str:
    """Returns lines of which each expands to ten times the one before."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{k + 1}: &a{k + 1} {more.format(', '.join([f'*a{k}'] * 10))}" for k in range(LEVELS)]
    return "\n".join(lines) + "\n"


BOMBS = {
    "merge keys": nested("{k: 1}", "{{<<: [{}]}}"),
    "aliases": nested("[x]", "[{}]"),
    "aliases in mappings": nested("{k: 1}", "{{k: [{}]}}"),
    "both": nested("{k: [1]}", "{{<<: [{}]}}") + f"b: [{', '.join([f'*a{LEVELS}'] * 10)}]\n",
    "a chain of aliases": "a0: &a0 [x]\n" + "".join(f"a{k + 1}: &a{k + 1} [*a{k}]\n" for k in range(200)),
    "a chain of merge keys": "a0: &a0 {x: 1}\n" + "".join(f"a{k + 1}: &a{k + 1} {{<<: *a{k}}}\n" for k in range(200)),
    "one list, many times": f"a: &a [{', '.join(['x'] * 1000)}]\nb: [{', '.join(['*a'] * 1000)}]\n",
    "levels": "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
    "characters": "# " + "x" * MAX_CHARACTERS,
    "itself": "a: &a {b: {<<: *a}}\n",
    "a number": "epochs: 0x" + "f" * 100_000,
}
every_bomb = pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)


@every_bomb
def test_a_file_that_is_too_large_raises_an_error(text):
    with pytest.raises(ExperimentError, match=r"^x\.yaml"):
        read("x.yaml", BASE + text if text.startswith("a") else text)


def test_too_many_values_without_aliases_raise_an_error():
    with pytest.raises(ExperimentError, match=r"^x\.yaml:1:\d+: expected at most 100000 values"):
        read("x.yaml", "[" + "x," * MAX_VALUES + "]")


@every_bomb
def test_a_neon_file_that_is_too_large_raises_an_error(text):
    head = "epoch: !obj:experiments.FitExperiment {}\n"
    with pytest.raises(ExperimentError, match=r"^x\.yaml"):
        parse("x.yaml", head + text)


@every_bomb
def test_a_command_line_value_that_is_too_large_raises_an_error(text):
    with pytest.raises(ExperimentError, match="--set"):
        parse_set(f"model={text}")


@every_bomb
@pytest.mark.parametrize("flag", ["--resume", "--checkpoint"])
def test_a_saved_experiment_that_is_too_large_raises_an_error(flag, text, tmp_path):
    directory = RunDirectory(tmp_path)
    (tmp_path / "experiment.yaml").write_text(text)
    with pytest.raises(ExperimentError, match=rf"^{flag}.*experiment\.yaml"):
        (directory.check_resumable if flag == "--resume" else directory.check_model)(experiment(BASE))


def test_an_endless_file_is_not_read_completely(capsys):
    assert main(["train", "/dev/zero"]) == 2
    assert "/dev/zero: expected at most" in capsys.readouterr().err


def test_a_pipe_in_a_run_directory_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "experiment.yaml")
    with pytest.raises(ExperimentError, match="there is no run in"):
        RunDirectory(tmp_path).check_resumable(experiment(BASE))
    RunDirectory(tmp_path).check_model(experiment(BASE))  # as without a saved experiment


def test_lines_of_a_log_that_no_run_has_written_are_removed(tmp_path):
    directory = RunDirectory(tmp_path)
    strange = ["[" * 100_000, "[]", '"x"', '{"step": Infinity}', '{"step": "x"}', '{"step": 1' + "0" * 10_000 + "}"]
    directory.log.write_text("\n".join(['{"step": 1}', *strange]) + "\n")
    directory.truncate_log(5)
    assert directory.log.read_text() == '{"step": 1}\n'


def test_ordinary_files_are_far_below_the_limits():
    deep = "[" * 50 + "x" + "]" * 50
    layers = "".join(f"    - linear: {{units: {n}, activation: relu}}\n" for n in range(1, 500))
    values = document("x", compose("x", f"model:\n  layers:\n{layers}other: {deep}\n")).values
    assert len(values["model"]["layers"]) == 499
    merged = "base: &base {a: 1, b: 2}\nown: {<<: *base, b: 3}\nboth: {<<: [{b: 4}, *base]}\n"
    values = document("x", compose("x", merged)).values
    assert values["own"] == {"a": 1, "b": 3} and values["both"] == {"a": 1, "b": 4}
