"""Reads YAML into plain values with the line and column of each. Size is limited, and no tag executes code."""

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
"""Keys and indices that lead to a value, such as ("model", "layers", 2, "conv")."""

YAML_TAG = "tag:yaml.org,2002:"
MAX_CHARACTERS = 1_000_000
MAX_VALUES = 100_000
"""Counted after expansion of aliases and `<<`: a file of a few lines can expand to billions of values."""
MAX_DEPTH = 100
MAX_NUMBER_LENGTH = 100
"""In characters. Parsing or printing a longer number can take Python minutes."""


class _LimitExceeded(Exception):
    """The text exceeds a limit at `mark`."""

    def __init__(self, reason: str, mark: yaml.Mark):
        super().__init__(reason)
        self.mark = mark


class _Loader(yaml.SafeLoader):
    """Composes a limited number of nodes. Numbers are those of YAML 1.2: 1e-3 is a number, 1:30 is text."""

    yaml_implicit_resolvers: dict = {}  # noqa: RUF012  (as declared by PyYAML)

    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = self._nodes = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_VALUES:
            raise _LimitExceeded(f"expected at most {MAX_VALUES} values", self.peek_event().start_mark)
        if self._depth > MAX_DEPTH:
            raise _LimitExceeded(_TOO_DEEP, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_TOO_DEEP = f"lists or mappings are nested too deeply: expected at most {MAX_DEPTH} levels"


class Dumper(yaml.SafeDumper):
    """Writes YAML that `_Loader` reads unchanged: quotes text such as 1e-3, which is a number in YAML 1.2 only."""


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+0123456789.")),
    ("merge", r"<<", ["<"]),
):  # fmt: skip
    for _class in (_Loader, Dumper):
        _class.add_implicit_resolver(YAML_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)


@dataclass
class Document:
    """The values of an experiment, and the place of each value and key: `file:line:column` or a command line option."""

    name: str
    values: Any
    places: dict[KeyPath, str] = field(default_factory=dict)
    key_places: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath, of_key: bool = False) -> str:
        """Returns the place of the value at `path`, or of its key; of the nearest parent if `path` does not exist."""
        if of_key and path in self.key_places:
            return self.key_places[path]
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)

    def copy_places(self, path: KeyPath, other: KeyPath, value: object) -> None:
        """Records the places of `value`, found at `path`, also for `other`: the path of its long form."""
        below = list(
            _paths(value)
        )  # rather than all of `places`, which would be quadratic in the number of short forms
        for places in (self.places, self.key_places):
            places.update({(*other, *rest): places[(*path, *rest)] for rest in below if (*path, *rest) in places})


def _paths(value: object) -> Iterator[KeyPath]:
    """Yields the path of each part of a value, relative to the value; () for the value itself."""
    yield ()
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from ((key, *rest) for rest in _paths(item))


def _working_directory(path: Path) -> str:
    """Returns where a relative path was looked for: launchers may start ranks of other hosts in another directory."""
    try:
        return "" if path.is_absolute() else f" in {Path.cwd()}"
    except OSError:
        return ", and the working directory does not exist"


def read_text(path: Path) -> str:
    """Returns the text of a file; raises an ExperimentError if it cannot be read or is too large."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        hint = nearest(path.name, siblings) if siblings else "`torchmn new mnist-cnn` writes an example."
        raise ExperimentError(f"{path}: there is no such file{_working_directory(path)}. {hint}") from None
    except UnicodeDecodeError as error:
        raise ExperimentError(
            f"{path}: expected a text file in UTF-8, got byte {error.object[error.start]:#x}"
        ) from None
    except (OSError, ValueError) as error:
        raise ExperimentError(f"{path}: cannot be read ({getattr(error, 'strerror', error)})") from None
    _check_length(str(path), text)
    return text


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ExperimentError(f"{name}: expected at most {MAX_CHARACTERS} characters")


def compose(name: str, text: str) -> Node:
    """Returns the root node of a YAML text.

    All YAML is read through this function. After expansion of aliases and `<<`, the tree has at most MAX_VALUES nodes
    and MAX_DEPTH levels, and no node contains itself.

    Raises:
        ExperimentError: if the text is not valid YAML, is empty, or exceeds these limits.
    """
    _check_length(name, text)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ExperimentError(f"{where}: invalid YAML: {reason}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise ExperimentError(f"{name}:{line}:{column}: invalid YAML: {error.reason}") from None
    except _LimitExceeded as error:
        raise ExperimentError(f"{name}:{error.mark.line + 1}:{error.mark.column + 1}: {error}") from None
    if node is None:
        raise ExperimentError(
            f"{name}:1:1: the file is empty: expected at least dataset, model, optimizer, epochs and batch_size"
        )
    _SizeCheck(name).measure(node, 1)
    return node


class _SizeCheck:
    """Checks the number of values and levels of a tree with all aliases expanded.

    Each node is visited once, so that the time is proportional to the length of the text, not to the expanded size.
    """

    def __init__(self, name: str):
        self.name = name
        self._sizes: dict[int, tuple[int, int]] = {}
        self._ancestors: set[int] = set()

    def measure(self, node: Node, level: int) -> tuple[int, int]:
        """Returns the values and levels of a node; raises an ExperimentError if it is too large or contains itself."""
        if id(node) in self._ancestors:
            raise ExperimentError(f"{place(self.name, node)}: an alias refers to a node that contains it")
        if id(node) not in self._sizes:
            self._ancestors.add(id(node))
            inner = [self.measure(child, level + 1) for child in children(node)]
            self._ancestors.remove(id(node))
            self._sizes[id(node)] = 1 + sum(values for values, _ in inner), 1 + max((n for _, n in inner), default=0)
        values, levels = self._sizes[id(node)]
        if values > MAX_VALUES:
            raise ExperimentError(f"{self.name}: more than {MAX_VALUES} values; are there aliases of aliases?")
        if level + levels - 1 > MAX_DEPTH:
            raise ExperimentError(f"{place(self.name, node)}: {_TOO_DEEP}")
        return values, levels


def children(node: Node) -> list[Node]:
    """Returns the child nodes of a node: its items, or its keys and values."""
    if isinstance(node, MappingNode):
        return [child for pair in node.value for child in pair]
    return node.value if isinstance(node, SequenceNode) else []


def document(name: str, root: Node) -> Document:
    """Returns the values below a node from `compose`; raises an ExperimentError for a tag or a duplicate key."""
    reader = _Reader(name)
    return Document(name, reader.value(root, ()), reader.places, reader.key_places)


class _Reader:
    """Converts nodes to values and records their places."""

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
            raise ExperimentError(f"{self.places[path]}: {_tag_problem(node.tag)}")
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
        result = {}
        for key, key_node, value_node in pairs(self.name, node):
            self.key_places[(*path, key)] = place(self.name, key_node)
            result[key] = self.value(value_node, (*path, key))
        return result


def pairs(name: str, node: Node) -> Iterator[tuple[str | int, Node, Node]]:
    """Yields the key, the key node and the value node of each entry of a mapping; entries merged by `<<` come last."""
    assert isinstance(node, MappingNode)
    merged: list[Node] = []
    found: dict[Hashable, Node] = {}
    for key_node, value_node in node.value:
        if key_node.tag == YAML_TAG + "merge":
            merged += value_node.value if isinstance(value_node, SequenceNode) else [value_node]
            continue
        key = scalar(name, key_node) if isinstance(key_node, ScalarNode) else None
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise ExperimentError(f"{place(name, key_node)}: expected a name as the key, got {_describe(key_node)}")
        if key in found:
            first = place(name, found[key]).removeprefix(f"{name}:")
            raise ExperimentError(f"{place(name, key_node)}: duplicate key {key!r} (first at {first})")
        found[key] = key_node
        yield key, key_node, value_node
    for other in merged:
        if not isinstance(other, MappingNode):
            raise ExperimentError(f"{place(name, other)}: expected `<<` to merge mappings, got {_describe(other)}")
        for key, key_node, value_node in pairs(name, other):
            if key not in found:
                found[key] = key_node
                yield key, key_node, value_node


def scalar(name: str, node: ScalarNode) -> str | float | bool | None:
    """Returns the value of a scalar node: a string, a number, a bool or None."""
    text, kind = node.value, node.tag.removeprefix(YAML_TAG)
    try:
        if kind in ("int", "float") and len(text) > MAX_NUMBER_LENGTH:
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
        raise ExperimentError(f"{place(name, node)}: cannot read this {kind}: {text[:40]!r}") from None
    raise ExperimentError(f"{place(name, node)}: {_tag_problem(node.tag)}")


def place(name: str, node: Node) -> str:
    """Returns `file:line:column` of a node."""
    return f"{name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _describe(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return repr(node.value[:40])
    return "a list" if isinstance(node, SequenceNode) else "a mapping"


def _tag_problem(tag: str) -> str:
    name = tag.replace(YAML_TAG, "!!")
    return f"expected no tag, got {name!r}: experiment files contain plain values only"
