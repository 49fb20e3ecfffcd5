"""docs/experiments.md: its files load, its lists are complete, its messages are those that users read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.experiment.running import read, registry, train
from torchmn.errors import ExperimentError
from torchmn.experiment import Experiment

TEXT = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)
FILE = BLOCKS[0]

# What the page states outside of its table of options, for all words of a kind.
OF_ALL_WORDS = {
    "layers": ("activation", "batch_norm", "bias", "init", "bias_init", "optimizer", "bias_optimizer"),
    "costs": ("scale", "units", "target", "outputs"),
    "optimizers": ("lr", "weight_decay", "schedule"),
    "metrics": ("units", "outputs"),
    "datasets": ("path", "sample", "train_sample", "validation"),
}


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


def test_every_option_is_listed_with_its_value_and_every_listed_option_exists():
    table = TEXT[TEXT.index("<!-- options") : TEXT.index("A branch gives")]
    rows = re.findall(r"^\| (`.*?) \| (`.*?) \|$", table, re.M)
    listed = {
        word: re.findall(r"`(.+?)`", options) for words, options in rows for word in re.findall(r"`(\w+)`", words)
    }
    existing = {}
    for kind in registry.KINDS:
        if kind is registry.schedules:
            continue  # their options are the arguments that torch documents
        for cls in kind.entries.values():
            options = [_option(info.alias or name, info) for name, info in cls.model_fields.items()]
            own = [option for option in options if option.partition("=")[0] not in OF_ALL_WORDS.get(kind.plural, ())]
            if own and cls.__module__.startswith("torchmn."):
                existing[cls.kind] = own
    assert listed == existing


def _option(name, info):
    """As the table has it: with its value, if it has one to be shown."""
    if info.is_required() or info.default is None or info.default_factory is not None:
        return name
    return f"{name}={str(info.default).lower() if isinstance(info.default, bool) else info.default}"


def test_every_key_of_the_file_is_explained():
    for name in Experiment.model_fields:
        assert re.search(rf"^\|[^|]*`{name}`", TEXT, re.M), name


@pytest.mark.parametrize(("old", "new", "line"), [("- conv:    ", "- cnov:    ", 0), ("maps: 20", "maps: four", 1)])
def test_the_messages_are_those_of_the_page(old, new, line):
    expected = re.search(r"```text\n(.*?)```", TEXT, re.S)[1].splitlines()[line]
    with pytest.raises(ExperimentError) as error:
        read("cnn.yaml", FILE.replace(old, new))
    assert re.sub(r":\d+:\d+:", ":", str(error.value)) == re.sub(r":\d+:\d+:", ":", expected)


def test_words_of_ones_own_do_what_their_comments_say():
    before = {kind: dict(kind.entries) for kind in registry.KINDS}
    source = re.search(r"```python\n(.*?)```", TEXT, re.S)[1]
    examples = dict(re.findall(r'register_(\w+)\("\w+"\)  # (.*)', source))
    assert examples.keys() == {"dataset", "layer", "cost", "metric"}
    text = f"{examples['dataset']}\nmodel:\n  layers:\n    {examples['layer']}\n    - linear: 3\n  {examples['cost']}\n"
    text += f"optimizer: {{name: sgd, lr: 0.1}}\nepochs: 1\nbatch_size: 10\n{examples['metric']}\n"
    try:
        exec(source, {"__name__": "own_words"})
        ran = train(read("x.yaml", text), 2, "datapar")
    finally:
        for kind, entries in before.items():
            kind.entries = entries
    assert len(ran.losses) == 9  # 81 samples: of 100 ten are for testing, and of the others a tenth for validation
    assert 1 / 3 < next(value for name, value in ran.history[0].items() if "confidence" in name) < 1
