"""docs/experiments.md: its files load, its lists are complete, its messages are those that users read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchmn.errors import ExperimentError
from torchmn.experiment import registry
from torchmn.experiment.load import read
from torchmn.experiment.schema import Experiment

TEXT = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
FILE = BLOCKS[0]


def test_the_file_loads_and_a_branch_fits_into_it():
    assert read("cnn.yaml", FILE).epochs == 5
    head, _, tail = FILE.partition("    - max_pool")
    assert len(read("cnn.yaml", f"{head}{BLOCKS[1]}    - max_pool{tail}").model.layers) == 5


def test_every_word_is_listed_and_every_listed_word_exists():
    words = TEXT[TEXT.index("<!-- words") :]
    for kind in registry.KINDS:
        listed = re.search(rf"\*\*{kind.plural}\*\*(.*?)\n(?:- |\n)", words, re.S)
        assert listed is not None, kind.plural
        names = set(re.findall(r"`(\w+)`", listed[1]))
        shown = {cls.kind for cls in kind.entries.values() if cls.__module__.startswith("torchmn.")}
        if kind is registry.layers:
            shown -= {cls.kind for cls in registry.activations.entries.values()}
        assert names == shown, kind.plural


def test_every_key_of_the_file_is_explained():
    for name in Experiment.model_fields:
        assert re.search(rf"^\|[^|]*`{name}`", TEXT, re.M), name


@pytest.mark.parametrize(("old", "new", "line"), [("- conv:    ", "- cnov:    ", 0), ("maps: 20", "maps: four", 1)])
def test_the_messages_are_those_of_the_page(old, new, line):
    expected = re.search(r"```text\n(.*?)```", TEXT, re.S)[1].splitlines()[line]
    with pytest.raises(ExperimentError) as error:
        read("cnn.yaml", FILE.replace(old, new))
    assert re.sub(r":\d+:\d+:", ":", str(error.value)) == re.sub(r":\d+:\d+:", ":", expected)
