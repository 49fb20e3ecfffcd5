"""Damaged experiment files, in TorchMN's format and in those of neon."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from pathlib import Path

from tools.fuzzing.mutations import decimal, mutated
from tools.fuzzing.subject import Subject
from torchmn.errors import ExperimentError
from torchmn.experiment.file.document import read_text
from torchmn.experiment.file.writing import as_yaml
from torchmn.experiment.vocabulary.load import check, check_round_trip, load, parse

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "experiment files": ("torchmn/experiment/starters", "examples"),
    "neon files": ("tests/experiment/neon_files",),
}
_SCALAR = re.compile(r"(?<=[:\-,\[ ] )[^\s,{}\[\]#]+|(?<=[\[{ ])[\w.]+(?=[,\]}:])")
_NAME = re.compile(r"\b[a-z_]{3,}\b")
_LINES = (
    "a: &a {x: 1}", "b: {<<: *a, <<: *a}", "<<: [1]", "<<: *nowhere", "*a : 1", "? [1, 2]\n: 3", "? {a: 1}",
    "!!python/name:os.system x", "x: !!python/object/apply:os.system [ls]", "x: !!binary aGVsbG8=",
    "x: !!set {a, b}", "x: !!timestamp 2001-01-01", "x: !obj:os.system {}", "x: !hyperopt FLOAT 0 1", "--- ", "...",
    "%YAML 9.9", "%TAG ! x", "\t- x", "- x", "}", "]", "'", '"', "|", ">", "x: |2",
    "module: {name: torch.nn.Flatten}", "imports: [os.path]", "imports: 3", "imports: [nowhere.at.all, '']",
    "metrics: [accuracy, accuracy]", "{" * 90, "[" * 200, "- " * 150 + "x", "&a [*a]", "x: &x [*x]",
    "x: " + "y" * 5000, "\u2028x: 1", "\ufeffx: 1", "x: \x07", "\x85", "epochs: 1", "seed: 1", "dtype: float16",
    "parallel: {mode: halopar}", "keep: 0", "model:", "optimizer: {}",
)  # fmt: skip
_VALUES = (
    "", "~", "null", "true", "yes", "[]", "{}", "''", "x", "[[]]", "[1, 2]", "{a: 1}", "*a", "&a 1", "!!int x",
    "!!float x", "!!str 1", "!!null x", "!!bool x", "!x y", "0x10", "0xff" + "f" * 99, "1e3", ".inf", "-.inf",
    ".nan", "1:30", "10%", "-5%", "1e400%", "%", "0%", "'1'", "1.0", "relu", "linear", "softmax", "sgd", "mnist",
    "cross_entropy", "mean", "1_000", "0o17", "-0", "+1", "\u0663", "inf", "[1, [2, [3]]]", "[3, 3, 3, 3, 3]",
    "{name: x}", "{name: {name: x}}", "{name: [1]}", "[-1, 0]", "9" * 90, "1e-400",
)  # fmt: skip


@functools.cache
def _texts(name: str) -> tuple[str, ...]:
    paths = sorted(path for folder in FOLDERS[name] for path in (ROOT / folder).rglob("*.yaml"))
    return tuple(path.read_text() for path in paths)


def _content(name: str, draw: random.Random) -> bytes:
    texts = _texts(name)
    text = draw.choice(texts)
    if draw.random() < 0.15:
        return mutated(draw, text.encode(), [other.encode() for other in texts])
    for _ in range(draw.choice((1, 1, 2, 2, 4, 8))):
        change = draw.choice((_with_value, _with_value, _with_value, _with_name, _with_lines, _with_lines))
        text = change(draw, text, texts)
    return text.encode("utf-8", "surrogatepass")


def _with_value(draw: random.Random, text: str, _: tuple[str, ...]) -> str:
    """Replaces a value, most often by one of another type, or by another value of the file."""
    found = list(_SCALAR.finditer(text))
    if not found:
        return text
    match, other = draw.choice(found), draw.choice(found)
    value = draw.choice((draw.choice(_VALUES), draw.choice(_VALUES), decimal(draw), other[0]))
    return text[: match.start()] + value + text[match.end() :]


def _with_name(draw: random.Random, text: str, texts: tuple[str, ...]) -> str:
    """Replaces a name, or a key, by one of another file, or by a misspelled one."""
    found = list(_NAME.finditer(text))
    if not found:
        return text
    match = draw.choice(found)
    other = draw.choice(_NAME.findall(draw.choice(texts)) or ["x"])
    name = draw.choice((other, other, match[0][:-1], match[0] + "s", match[0].upper(), "__class__", "x"))
    return text[: match.start()] + name + text[match.end() :]


def _with_lines(draw: random.Random, text: str, texts: tuple[str, ...]) -> str:
    """Adds, drops, doubles, moves or indents lines."""
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    choice = draw.random()
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    if choice < 0.2:
        del lines[at : at + draw.choice((1, 1, 2, 5))]
    elif choice < 0.35:
        lines[at : at + 1] = [lines[at]] * draw.choice((2, 2, 300))
    elif choice < 0.5:
        lines[at] = draw.choice((" ", "  ", "    ", "\t")) + lines[at]
    elif choice < 0.6:
        lines[at] = lines[at].lstrip()
    elif choice < 0.75:
        other = draw.choice(texts).split("\n")
        begin = draw.randrange(len(other))
        lines[at:at] = other[begin : begin + draw.choice((1, 3, 10))]
    else:
        lines.insert(at, indent + draw.choice(_LINES))
    return "\n".join(lines)


def _read(path: Path) -> None:
    """Loads an experiment as `torchmn train` does, and if it is valid, writes and reads it again."""
    experiment = load(path)
    check_round_trip(experiment)


def _convert(path: Path) -> None:
    """Does what `torchmn convert` does, then loads the file as `torchmn train` does."""
    converted = parse(str(path), read_text(path))
    check(converted.document, run_imports=False)
    as_yaml(converted.document.values)
    _read(path)


def _subject(name: str, read: Callable[[Path], object]) -> Subject:
    content = functools.partial(_content, name)
    return Subject(name, "mutated.yaml", content, read, (ExperimentError,), "YAML", may_be_pipe=True)


SUBJECTS = (_subject("experiment files", _read), _subject("neon files", _convert))
