"""A value of a file with its place, and for `!obj:` the class that it names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from torchmn.errors import ExperimentError
from torchmn.experiment.file.document import Document, KeyPath, place, scalar

OBJECT = "!obj:"
HYPEROPT = "!hyperopt"


@dataclass(frozen=True)
class Range:
    """`!hyperopt lr FLOAT 0.01 0.1`: where neon's search tool put a value. Here the user does."""

    text: str

    @property
    def example(self) -> str:
        """A value inside of it, as --set takes it."""
        kind, *bounds = self.text.split()[1:] or [""]
        try:
            low, high = map(float, bounds)
        except ValueError:
            return bounds[0] if bounds else "..."
        return str(round((low + high) / 2)) if kind == "INT" else f"{(low + high) / 2:g}"

    @property
    def refusal(self) -> str:
        """Why it can not stand where a number is computed with."""
        return f"!hyperopt {self.text}: no search is there any more: write a number in its place"

    def __float__(self) -> float:
        raise ExperimentError(self.refusal)


@dataclass
class Said:
    """value: a plain value, a list of Said, or a dict of them; kind: the class of an object, without its modules."""

    value: Any
    where: str
    kind: str | None = None

    @property
    def name(self) -> str:
        """The class without `Dist`: distributed and ordinary ones mean the same today."""
        return (self.kind or "").removesuffix("Dist")

    def get(self, key: str) -> Said | None:
        """What stands under a key; None if nothing does, or `null`."""
        found = self.value.get(key) if isinstance(self.value, dict) else None
        return found if found is not None and found.value is not None else None

    def plain(self, key: str, default: Any = None) -> Any:
        """The value under a key, with all places forgotten."""
        found = self.get(key)
        return default if found is None else plain(found)

    def number(self, key: str, default: float | None = None) -> float:
        """The number under a key, or the default; an ExperimentError where there is neither."""
        found = self.get(key)
        if found is None:
            if default is None:
                raise ExperimentError(f"{self.where}: the key {key!r} is missing here")
            return default
        if isinstance(found.value, Range):
            raise ExperimentError(f"{found.where}: {found.value.refusal}")
        if isinstance(found.value, bool | dict | list | str):
            raise ExperimentError(f"{found.where}: expected {key} to be a number, got {str(plain(found))[:60]!r}")
        return float(found.value)

    def word(self, key: str, default: str | None = None) -> str | None:
        """The word under a key, or the default; an ExperimentError where something else stands there."""
        found = self.get(key)
        if found is not None and not isinstance(found.value, str):
            raise ExperimentError(f"{found.where}: expected {key} to be a word, got {str(plain(found))[:60]!r}")
        return default if found is None else found.value

    def items(self) -> Iterator[tuple[str, Said]]:
        if not isinstance(self.value, dict):
            raise ExperimentError(f"{self.where}: expected a mapping of keys to values, got {str(plain(self))[:60]!r}")
        yield from self.value.items()


def plain(said: Said) -> Any:
    """The value, with all places forgotten."""
    if isinstance(said.value, dict):
        return {key: plain(item) for key, item in said.value.items()}
    if isinstance(said.value, list):
        return [plain(item) for item in said.value]
    return said.value


def number_of(said: Said) -> Said:
    """A whole number as the float that our options take; anything else as it is."""
    whole = isinstance(said.value, int) and not isinstance(said.value, bool)
    return Said(float(said.value), said.where) if whole else said


def at(where: str, value: Any) -> Said:
    """A value that we say, in the name of a place in the old file."""
    if isinstance(value, Said):
        return value
    if isinstance(value, dict):
        return Said({key: at(where, item) for key, item in value.items() if item is not None}, where)
    if isinstance(value, list | tuple):
        return Said([at(where, item) for item in value], where)
    return Said(value, where)


def as_document(name: str, said: Said) -> Document:
    """The values, and where each of them was said."""
    places: dict[KeyPath, str] = {}

    def walk(said: Said, path: KeyPath) -> Any:
        places[path] = said.where
        if isinstance(said.value, dict):
            return {key: walk(item, (*path, key)) for key, item in said.value.items()}
        if isinstance(said.value, list):
            return [walk(item, (*path, number)) for number, item in enumerate(said.value)]
        return said.value

    values = walk(said, ())
    return Document(name, values, places, dict(places))


def read_nodes(name: str, root: Node) -> Said:
    """The tree of a file. A key of the experiment itself may stand twice, which neon's files use to hold anchors: the
    last one counts."""
    read: dict[int, Said] = {}

    def walk(node: Node) -> Said:
        where = place(name, node)
        if id(node) in read:
            return read[id(node)]
        kind = node.tag[len(OBJECT) :].rpartition(".")[2] if node.tag.startswith(OBJECT) else None
        if isinstance(node, MappingNode):
            if node is not root:
                _refuse_twice(name, node)
            value: Any = {_key(name, key): walk(item) for key, item in node.value}
        elif isinstance(node, SequenceNode):
            value = [walk(item) for item in node.value]
        else:
            assert isinstance(node, ScalarNode)
            if kind is not None:  # `!obj:transforms.Logistic` without braces
                value = {}
            elif node.tag == HYPEROPT:
                value = Range(node.value)
            elif node.tag.startswith("!"):
                raise ExperimentError(f"{where}: {node.tag.split()[0]} is not supported here, only !obj: is")
            else:
                value = scalar(name, node)
        if kind is None and node.tag.startswith("!") and not isinstance(node, ScalarNode):
            raise ExperimentError(f"{where}: {node.tag} is not supported here, only !obj: is")
        read[id(node)] = Said(value, where, kind)
        return read[id(node)]

    return walk(root)


def _refuse_twice(name: str, node: MappingNode) -> None:
    seen: set[str] = set()
    for key, item in node.value:
        text = _key(name, key)
        if text in seen:
            raise ExperimentError(f"{place(name, item)}: the key {text!r} stands here twice: neon took the last one")
        seen.add(text)


def _key(name: str, node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise ExperimentError(f"{place(name, node)}: expected a name as the key")
    return str(node.value)
