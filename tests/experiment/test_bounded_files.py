"""Files that stand for more than any experiment are refused at once, wherever YAML is read: nothing hangs on one."""

from __future__ import annotations

import os

import pytest

from tests.experiment.files import BASE
from tests.experiment.running import experiment
from torchmn.cli.main import main
from torchmn.errors import ExperimentError
from torchmn.experiment.file.document import MOST_CHARACTERS, MOST_LEVELS, MOST_VALUES, compose, document
from torchmn.experiment.file.overrides import parse_set
from torchmn.experiment.run.run_directory import RunDirectory
from torchmn.experiment.vocabulary.load import parse, read

LEVELS = 14  # 10**14 values, of which no reader would see the end
pytestmark = pytest.mark.timeout(120)


def nested(first: str, more: str) -> str:
    """Lines of which each stands for ten times the one before."""
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
    "levels": "[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1),
    "characters": "# " + "x" * MOST_CHARACTERS,
    "itself": "a: &a {b: {<<: *a}}\n",
    "a number": "epochs: 0x" + "f" * 100_000,
}
every_bomb = pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)


@every_bomb
def test_a_file_that_stands_for_too_much_is_refused(text):
    with pytest.raises(ExperimentError, match=r"^x\.yaml"):
        read("x.yaml", BASE + text if text.startswith("a") else text)


def test_so_is_one_with_too_many_values_of_its_own():
    with pytest.raises(ExperimentError, match=r"^x\.yaml:1:\d+: expected at most 100000 values"):
        read("x.yaml", "[" + "x," * MOST_VALUES + "]")


@every_bomb
def test_so_is_one_of_neon(text):
    head = "epoch: !obj:experiments.FitExperiment {}\n"
    with pytest.raises(ExperimentError, match=r"^x\.yaml"):
        parse("x.yaml", head + text)


@every_bomb
def test_so_is_a_value_of_the_command_line(text):
    with pytest.raises(ExperimentError, match="--set"):
        parse_set(f"model={text}")


@every_bomb
@pytest.mark.parametrize("flag", ["--resume", "--checkpoint"])
def test_so_is_the_record_of_a_run(flag, text, tmp_path):
    directory = RunDirectory(tmp_path)
    (tmp_path / "experiment.yaml").write_text(text)
    with pytest.raises(ExperimentError, match=rf"^{flag}.*experiment\.yaml"):
        (directory.go_on if flag == "--resume" else directory.check_trained)(experiment(BASE))


def test_a_file_without_an_end_is_not_read_to_its_end(capsys):
    assert main(["train", "/dev/zero"]) == 2
    assert "/dev/zero: expected at most" in capsys.readouterr().err


def test_a_pipe_in_a_run_directory_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "experiment.yaml")
    with pytest.raises(ExperimentError, match="there is no run in"):
        RunDirectory(tmp_path).go_on(experiment(BASE))
    RunDirectory(tmp_path).check_trained(experiment(BASE))  # as where there is no record


def test_lines_of_a_log_that_no_run_has_written_are_removed(tmp_path):
    directory = RunDirectory(tmp_path)
    strange = ["[" * 100_000, "[]", '"x"', '{"step": Infinity}', '{"step": "x"}', '{"step": 1' + "0" * 10_000 + "}"]
    directory.log.write_text("\n".join(['{"step": 1}', *strange]) + "\n")
    directory.cut_log(5)
    assert directory.log.read_text() == '{"step": 1}\n'


def test_what_people_write_is_far_from_the_bounds():
    deep = "[" * 50 + "x" + "]" * 50
    layers = "".join(f"    - linear: {{units: {n}, activation: relu}}\n" for n in range(1, 500))
    values = document("x", compose("x", f"model:\n  layers:\n{layers}other: {deep}\n")).values
    assert len(values["model"]["layers"]) == 499
    merged = "base: &base {a: 1, b: 2}\nown: {<<: *base, b: 3}\nboth: {<<: [{b: 4}, *base]}\n"
    values = document("x", compose("x", merged)).values
    assert values["own"] == {"a": 1, "b": 3} and values["both"] == {"a": 1, "b": 4}
