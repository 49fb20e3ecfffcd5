"""TaggedValue: a value of a neon file with its position and, for `!obj:`, the class that it names."""

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
    """`!hyperopt lr FLOAT 0.01 0.1`: a range for neon's hyperparameter search, which the user must replace."""

    text: str

    @property
    def example(self) -> str:
        """A value within the range, as text for --set."""
        kind, *bounds = self.text.split()[1:] or [""]
        try:
            low, high = map(float, bounds)
        except ValueError:
            return bounds[0] if bounds else "..."
        return str(round((low + high) / 2)) if kind == "INT" else f"{(low + high) / 2:g}"

    @property
    def refusal(self) -> str:
        """The error message where a number is needed."""
        return f"!hyperopt {self.text}: hyperparameter search is not supported: write a number instead"

    def __float__(self) -> float:
        raise ExperimentError(self.refusal)


@dataclass
class TaggedValue:
    """A value of a neon file.

    Attributes:
        value: a plain value, or a list or dict of TaggedValue.
        where: file, line and column.
        kind: the class of an object, without its modules.
    """

    value: Any
    where: str
    kind: str | None = None

    @property
    def name(self) -> str:
        """The class without `Dist`, and the B of FCLayerB: distributed classes are converted as ordinary ones."""
        name = (self.kind or "").removesuffix("Dist")
        return name[:-1] if name.endswith("LayerB") else name

    def get(self, key: str) -> TaggedValue | None:
        """Returns the value of a key; None if it is missing or `null`."""
        found = self.value.get(key) if isinstance(self.value, dict) else None
        return found if found is not None and found.value is not None else None

    def plain(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key as plain Python values."""
        found = self.get(key)
        return default if found is None else plain(found)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the number of a key, or the default; raises an ExperimentError if there is neither."""
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

    def string(self, key: str, default: str | None = None) -> str | None:
        """Returns the string of a key, or the default; raises an ExperimentError if it is not a string."""
        found = self.get(key)
        if found is not None and not isinstance(found.value, str):
            raise ExperimentError(f"{found.where}: expected {key} to be a string, got {str(plain(found))[:60]!r}")
        return default if found is None else found.value

    def items(self) -> Iterator[tuple[str, TaggedValue]]:
        if not isinstance(self.value, dict):
            raise ExperimentError(f"{self.where}: expected a mapping of keys to values, got {str(plain(self))[:60]!r}")
        yield from self.value.items()


def plain(tagged: TaggedValue) -> Any:
    """Returns a value as plain Python values."""
    if isinstance(tagged.value, dict):
        return {key: plain(item) for key, item in tagged.value.items()}
    if isinstance(tagged.value, list):
        return [plain(item) for item in tagged.value]
    return tagged.value


def same_object(one: TaggedValue, other: TaggedValue) -> bool:
    """Returns whether two values are the same object, by an alias, or have the same class and keys."""
    return one is other or (one.kind is not None and one.kind == other.kind and plain(one) == plain(other))


def as_float(tagged: TaggedValue) -> TaggedValue:
    """Returns an integer as a float, which options require; other values unchanged."""
    is_integer = isinstance(tagged.value, int) and not isinstance(tagged.value, bool)
    return TaggedValue(float(tagged.value), tagged.where) if is_integer else tagged


def at(where: str, value: Any) -> TaggedValue:
    """Returns a new value with a position in the original file, to which errors will refer."""
    if isinstance(value, TaggedValue):
        return value
    if isinstance(value, dict):
        return TaggedValue({key: at(where, item) for key, item in value.items() if item is not None}, where)
    if isinstance(value, list | tuple):
        return TaggedValue([at(where, item) for item in value], where)
    return TaggedValue(value, where)


def as_document(name: str, tagged: TaggedValue) -> Document:
    """Returns the plain values with the position of each."""
    places: dict[KeyPath, str] = {}

    def walk(tagged: TaggedValue, path: KeyPath) -> Any:
        places[path] = tagged.where
        if isinstance(tagged.value, dict):
            return {key: walk(item, (*path, key)) for key, item in tagged.value.items()}
        if isinstance(tagged.value, list):
            return [walk(item, (*path, number)) for number, item in enumerate(tagged.value)]
        return tagged.value

    values = walk(tagged, ())
    return Document(name, values, places, dict(places))


def read_nodes(name: str, root: Node, notes: list[str]) -> TaggedValue:
    """Returns the values of a file's YAML tree.

    Of a key that occurs twice, the last one counts, as in neon. Keys of the experiment itself do so without a note:
    neon's files define anchors in them.

    Args:
        name: of the file, for messages.
        root: the tree.
        notes: receives a line for each other key that occurs twice.
    """
    read: dict[int, TaggedValue] = {}

    def walk(node: Node) -> TaggedValue:
        where = place(name, node)
        if id(node) in read:
            return read[id(node)]
        kind = node.tag[len(OBJECT) :].rpartition(".")[2] if node.tag.startswith(OBJECT) else None
        if isinstance(node, MappingNode):
            if node is not root:
                notes.extend(_repeated(name, node))
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
        read[id(node)] = TaggedValue(value, where, kind)
        return read[id(node)]

    return walk(root)


def _repeated(name: str, node: MappingNode) -> list[str]:
    """Returns a note for each key of a mapping that a later one replaces."""
    last = {_key(name, key): item for key, item in node.value}
    return [
        f"{place(name, item)}: {_key(name, key)} has no effect: the same key follows at "
        f"{place(name, last[_key(name, key)])}, and the last one counts, as in neon"
        for key, item in node.value
        if item is not last[_key(name, key)]
    ]


def _key(name: str, node: Node) -> str:
    if not isinstance(node, ScalarNode):
        raise ExperimentError(f"{place(name, node)}: expected a name as the key")
    return str(node.value)
