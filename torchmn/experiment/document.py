"""An experiment file as plain values, with the line and column of each: nothing in a file is ever run."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from torchmn.errors import ExperimentError, nearest

KeyPath = tuple[str | int, ...]
"""Where a value stands: ("model", "layers", 2, "conv")."""

YAML_TAG = "tag:yaml.org,2002:"
MOST_VALUES = 100_000
"""A file of a few lines can stand for billions of values, by aliases of aliases."""


class _Loader(yaml.SafeLoader):
    """Composes nodes. Which words are numbers is YAML 1.2's choice: 1e-3 is one, 1:30 and `yes` are text."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  (declared so by PyYAML)


class Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: text such as 1e-3, which is a number to it and none to PyYAML, gets its quotes."""


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+0123456789.")),
    ("merge", r"<<", ["<"]),
):  # fmt: skip
    for _one in (_Loader, Dumper):
        _one.add_implicit_resolver(YAML_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass
class Document:
    """The values of an experiment, and what to say about where each of them comes from."""

    name: str
    values: Any
    places: dict[KeyPath, str] = field(default_factory=dict)
    key_places: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath, of_key: bool = False) -> str:
        """`file:line:column` of the value at `path`, or of its key; of what it stands in, if it is not there."""
        if of_key and path in self.key_places:
            return self.key_places[path]
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)

    def also_at(self, path: KeyPath, other: KeyPath) -> None:
        """Let what stands under `path` be found under `other`, too: a short form under its long form's path."""
        for places in (self.places, self.key_places):
            known = [(*other, *place[len(path) :]) for place in places if place[: len(path)] == path]
            places.update({new: places[(*path, *new[len(other) :])] for new in known})


def read_text(path: Path) -> str:
    """What a file holds; an ExperimentError if it can not be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        hint = nearest(path.name, beside) if beside else "`torchmn new mnist-cnn` writes one to start from."
        raise ExperimentError(f"{path}: there is no such file. {hint}") from None
    except UnicodeDecodeError as error:
        raise ExperimentError(
            f"{path}: expected a text file in UTF-8, got byte {error.object[error.start]:#x}"
        ) from None
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{path}: can not be read ({getattr(error, 'strerror', error)})") from None


def compose(name: str, text: str) -> Node:
    """The nodes of a text, with their tags and marks; an ExperimentError where it is not YAML."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ExperimentError(f"{where}: this is not YAML: {reason}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise ExperimentError(f"{name}:{line}:{column}: this is not YAML: {error.reason}") from None
    except RecursionError:
        raise ExperimentError(f"{name}:1:1: lists or mappings are nested too deeply") from None
    if node is None:
        raise ExperimentError(
            f"{name}:1:1: the file is empty: expected at least dataset, model, optimizer, epochs and batch_size"
        )
    return node


def document(name: str, root: Node) -> Document:
    """The values under a node; an ExperimentError for a tag, a key twice, or an alias of itself."""
    reader = _Reader(name)
    try:
        values = reader.value(root, (), ())
    except RecursionError:
        raise ExperimentError(f"{name}:1:1: lists or mappings are nested too deeply") from None
    return Document(name, values, reader.places, reader.key_places)


class _Reader:
    """Walks over nodes and notes where everything stood."""

    def __init__(self, name: str):
        self.name = name
        self.places: dict[KeyPath, str] = {}
        self.key_places: dict[KeyPath, str] = {}

    def value(self, node: Node, path: KeyPath, inside: tuple[Node, ...]) -> Any:
        self.places[path] = place(self.name, node)
        if len(self.places) > MOST_VALUES:
            raise ExperimentError(f"{self.name}: more than {MOST_VALUES} values; are there aliases of aliases?")
        if node in inside:
            raise ExperimentError(f"{self.places[path]}: this alias stands inside of what it stands for")
        if isinstance(node, ScalarNode):
            return scalar(self.name, node)
        plain = "map" if isinstance(node, MappingNode) else "seq"
        if node.tag != YAML_TAG + plain:
            raise ExperimentError(f"{self.places[path]}: {_no_tags(node.tag)}")
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, i), (*inside, node)) for i, item in enumerate(node.value)]
        result = {}
        for key, key_node, value_node in pairs(self.name, node, inside):
            self.key_places[(*path, key)] = place(self.name, key_node)
            result[key] = self.value(value_node, (*path, key), (*inside, node))
        return result


def pairs(name: str, node: Node, inside: tuple[Node, ...] = ()) -> Iterator[tuple[str | int, Node, Node]]:
    """Key, its node and the value's node, of each entry of a mapping; what `<<` merges in comes last."""
    assert isinstance(node, MappingNode)
    merged: list[Node] = []
    found: dict[Hashable, Node] = {}
    for key_node, value_node in node.value:
        if key_node.tag == YAML_TAG + "merge":
            merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
            continue
        key = scalar(name, key_node) if isinstance(key_node, ScalarNode) else None
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise ExperimentError(f"{place(name, key_node)}: expected a name as the key, got {shown(key_node)}")
        if key in found:
            first = place(name, found[key]).removeprefix(f"{name}:")
            raise ExperimentError(f"{place(name, key_node)}: the key {key!r} stands here twice (first at {first})")
        found[key] = key_node
        yield key, key_node, value_node
    for other in merged:
        if not isinstance(other, MappingNode) or other in inside or other is node:
            raise ExperimentError(f"{place(name, other)}: `<<` merges mappings, got {shown(other)}")
        for key, key_node, value_node in pairs(name, other, (*inside, node)):
            if key not in found:
                found[key] = key_node
                yield key, key_node, value_node


def scalar(name: str, node: ScalarNode) -> Any:
    """The text, number, truth value or nothing that a node says."""
    text, kind = node.value, node.tag.removeprefix(YAML_TAG)
    try:
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            return int(text, 16) if text.startswith("0x") else int(text)
        if kind == "float":
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
    except (KeyError, ValueError):
        raise ExperimentError(f"{place(name, node)}: this is no {kind} that can be read: {text[:40]!r}") from None
    raise ExperimentError(f"{place(name, node)}: {_no_tags(node.tag)}")


def place(name: str, node: Node) -> str:
    """`file:line:column` of a node."""
    return f"{name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def shown(node: Node) -> str:
    """A node in a few words, for messages."""
    if isinstance(node, ScalarNode):
        return repr(node.value[:40])
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def _no_tags(tag: str) -> str:
    name = tag.replace(YAML_TAG, "!!")
    return f"expected no tag, got {name!r}: experiment files hold plain values, and tags of other files are not run"
