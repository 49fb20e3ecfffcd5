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
MOST_CHARACTERS = 1_000_000
MOST_VALUES = 100_000
"""With those that aliases and `<<` stand for: a file of a few lines can stand for billions of them."""
MOST_LEVELS = 100
LONGEST_NUMBER = 100
"""Characters. Reading a longer one, or writing it into a message, can take Python minutes."""


class _TooMuch(Exception):
    """A text with more in it than any experiment has; `mark` is where that shows."""

    def __init__(self, reason: str, mark: yaml.Mark):
        super().__init__(reason)
        self.mark = mark


class _Loader(yaml.SafeLoader):
    """Composes nodes, of a bounded number. Which words are numbers is YAML 1.2's choice: 1e-3 is, 1:30 is text."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  (declared so by PyYAML)

    def __init__(self, stream: str):
        super().__init__(stream)
        self._levels = self._nodes = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self._nodes += 1
        self._levels += 1
        if self._nodes > MOST_VALUES:
            raise _TooMuch(f"expected at most {MOST_VALUES} values, and there are more", self.peek_event().start_mark)
        if self._levels > MOST_LEVELS:
            raise _TooMuch(_TOO_DEEP, self.peek_event().start_mark)
        node = super().compose_node(parent, index)  # type: ignore[arg-type]
        self._levels -= 1
        return node


_TOO_DEEP = f"lists or mappings are nested too deeply: expected at most {MOST_LEVELS} levels"


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

    def also_at(self, path: KeyPath, other: KeyPath, value: Any) -> None:
        """Let `value`, which stands under `path`, be found under `other`, too: a short form under its long form's."""
        below = list(_paths(value))  # not all of `places`: there may be many short forms
        for places in (self.places, self.key_places):
            places.update({(*other, *rest): places[(*path, *rest)] for rest in below if (*path, *rest) in places})


def _paths(value: Any) -> Iterator[KeyPath]:
    """Where each part of a value stands in it, and () for itself."""
    yield ()
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((key, *rest) for rest in _paths(item))


def read_text(path: Path) -> str:
    """What a file holds; an ExperimentError if it can not be read, or is larger than any experiment."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_CHARACTERS + 1)
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
    _check_length(str(path), text)
    return text


def _check_length(name: str, text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise ExperimentError(f"{name}: expected at most {MOST_CHARACTERS} characters: this is no experiment")


def compose(name: str, text: str) -> Node:
    """The nodes of a text, with their tags and marks.

    All YAML is read through here: whoever walks over the nodes meets at most MOST_VALUES of them, also through
    aliases and `<<`, at most MOST_LEVELS deep, and comes to an end.

    Raises:
        ExperimentError: where the text is not YAML, or stands for more than that.
    """
    _check_length(name, text)
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
    except _TooMuch as error:
        raise ExperimentError(f"{name}:{error.mark.line + 1}:{error.mark.column + 1}: {error}") from None
    if node is None:
        raise ExperimentError(
            f"{name}:1:1: the file is empty: expected at least dataset, model, optimizer, epochs and batch_size"
        )
    _Bounds(name).of(node, 1)
    return node


class _Bounds:
    """How many values each node stands for, with its aliases in place of what they stand for, and how deep it is.

    Each node is looked at once, so that this is as fast as the text is short.
    """

    def __init__(self, name: str):
        self.name = name
        self.known: dict[int, tuple[int, int]] = {}
        self.open: set[int] = set()

    def of(self, node: Node, level: int) -> tuple[int, int]:
        """Values and levels of a node; an ExperimentError where they are too many, or contain the node itself."""
        if id(node) in self.open:
            raise ExperimentError(f"{place(self.name, node)}: this alias stands inside of what it stands for")
        if id(node) not in self.known:
            self.open.add(id(node))
            inner = [self.of(child, level + 1) for child in children(node)]
            self.open.remove(id(node))
            self.known[id(node)] = 1 + sum(values for values, _ in inner), 1 + max((n for _, n in inner), default=0)
        values, levels = self.known[id(node)]
        if values > MOST_VALUES:
            raise ExperimentError(f"{self.name}: more than {MOST_VALUES} values; are there aliases of aliases?")
        if level + levels - 1 > MOST_LEVELS:
            raise ExperimentError(f"{place(self.name, node)}: {_TOO_DEEP}")
        return values, levels


def children(node: Node) -> list[Node]:
    """The nodes that stand in a node: items, or keys and values."""
    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, SequenceNode) else []


def document(name: str, root: Node) -> Document:
    """The values under a node that `compose` gave; an ExperimentError for a tag, or a key twice."""
    reader = _Reader(name)
    return Document(name, reader.value(root, ()), reader.places, reader.key_places)


class _Reader:
    """Walks over nodes and notes where everything stood."""

    def __init__(self, name: str):
        self.name = name
        self.places: dict[KeyPath, str] = {}
        self.key_places: dict[KeyPath, str] = {}

    def value(self, node: Node, path: KeyPath) -> Any:
        self.places[path] = place(self.name, node)
        if isinstance(node, ScalarNode):
            return scalar(self.name, node)
        plain = "map" if isinstance(node, MappingNode) else "seq"
        if node.tag != YAML_TAG + plain:
            raise ExperimentError(f"{self.places[path]}: {_no_tags(node.tag)}")
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        result = {}
        for key, key_node, value_node in pairs(self.name, node):
            self.key_places[(*path, key)] = place(self.name, key_node)
            result[key] = self.value(value_node, (*path, key))
        return result


def pairs(name: str, node: Node) -> Iterator[tuple[str | int, Node, Node]]:
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
        if not isinstance(other, MappingNode):
            raise ExperimentError(f"{place(name, other)}: `<<` merges mappings, got {shown(other)}")
        for key, key_node, value_node in pairs(name, other):
            if key not in found:
                found[key] = key_node
                yield key, key_node, value_node


def scalar(name: str, node: ScalarNode) -> Any:
    """The text, number, truth value or nothing that a node says."""
    text, kind = node.value, node.tag.removeprefix(YAML_TAG)
    try:
        if kind in ("int", "float") and len(text) > LONGEST_NUMBER:
            raise ValueError
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
