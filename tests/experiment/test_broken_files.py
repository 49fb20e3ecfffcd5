"""Invalid files raise one line: the place, what was expected, what was found, and the nearest valid name."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from tests.experiment import broken_combinations, broken_layers, broken_sections, broken_yaml
from tests.experiment.files import BASE
from tests.experiment.running import build_model, load_data, read
from torchmn.errors import ExperimentError

BROKEN = broken_yaml.BROKEN + broken_sections.BROKEN + broken_layers.BROKEN + broken_combinations.BROKEN


def build(text: str) -> None:
    experiment = read("x.yaml", text)
    build_model(experiment, load_data(experiment, None)["train"])


def test_there_are_many_invalid_files_and_their_base_is_valid():
    assert len({text for _, text, _ in BROKEN}) >= 60
    build(BASE)


@pytest.mark.parametrize(("text", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_an_invalid_file_raises_one_line_with_place_and_remedy(text, message):
    with pytest.raises(ExperimentError) as error:
        build(text)
    assert str(error.value) == "x.yaml:" + message.replace("{cwd}", os.getcwd())


def test_all_errors_are_reported_in_the_order_of_the_file():
    text = BASE.replace("maps: 4", "maps: 0").replace("lr: 0.1", "lr: x").replace("epochs: 1", "epochs: 0")
    with pytest.raises(ExperimentError) as error:
        build(text)
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [
        "x.yaml:4:20",
        "x.yaml:8:28",
        "x.yaml:9:9",
    ]


def test_a_file_of_a_few_lines_cannot_expand_to_billions_of_values():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k + 1}: &a{k + 1} [{', '.join([f'*a{k}'] * 10)}]" for k in range(9)]
    with pytest.raises(ExperimentError, match="more than 100000 values"):
        build("\n".join(lines))


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 3000, "- " * 3000])
def test_deep_nesting_raises_an_error_and_does_not_overflow(text):
    with pytest.raises(ExperimentError):
        build(text)


# Parts of valid files, so that most drawn files are nearly valid.
LINES = """
dataset name mnist iris sample 10% model layers conv maps kernel activation relu linear units cost cross_entropy
optimizer sgd lr momentum schedule step epochs batch_size seed metrics accuracy parallel mode datapar grid height
branch list dropout module torch.nn.Flatten imports dtype float64 predictions test <<
"""
WORDS = some.sampled_from(LINES.split())
SCALARS = WORDS | some.integers(-3, 200) | some.floats() | some.booleans() | some.none() | some.text(max_size=5)
VALUES = some.recursive(
    SCALARS,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(WORDS | some.text(max_size=3), inner, max_size=4),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=some.dictionaries(WORDS, VALUES, max_size=8), drawn=some.data())
def test_a_file_with_any_values_is_read_or_raises_an_experiment_error(values, drawn):
    import yaml

    text = yaml.safe_dump(values, allow_unicode=True)
    if drawn.draw(some.booleans()):  # a working file, with one of its lines replaced
        lines = BASE.splitlines()
        place = drawn.draw(some.integers(0, len(lines) - 1))
        lines[place] = drawn.draw(some.sampled_from(["", " ", "- "])) + text.strip().split("\n")[0]
        text = "\n".join(lines)
    check_read_or_error(text)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    cut=some.integers(0, len(BASE)),
    piece=some.text(alphabet="{}[]:,-&*!|>'\"%@`#?\t\n <=.ae0\\\u0000\u00e9\ufeff", max_size=12),
    length=some.integers(0, 20),
)
def test_a_file_with_any_characters_is_read_or_raises_an_experiment_error(cut, piece, length):
    check_read_or_error(BASE[:cut] + piece + BASE[cut + length :])


def check_read_or_error(text: str) -> None:
    message = "x.yaml"
    try:
        read("x.yaml", text)
    except ExperimentError as error:
        message = str(error)
    assert message and all(line.startswith("x.yaml") for line in message.splitlines())
