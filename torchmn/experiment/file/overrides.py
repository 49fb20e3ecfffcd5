"""Values on the command line that replace values of the file, such as --set optimizer.lr=0.1 or --epochs 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.document import Document, KeyPath, compose, document


@dataclass(frozen=True)
class Override:
    """A value that replaces or adds a value of an experiment file.

    Attributes:
        path: the keys and list indices that lead to the value, such as ("optimizer", "lr").
        value: the new value, as plain YAML data.
        source: the command line option that it comes from, for error messages.
    """

    path: KeyPath
    value: Any
    source: str


def parse_set(text: str) -> Override:
    """Returns the override that `--set KEY.KEY=VALUE` describes.

    Args:
        text: keys joined by dots, `=`, and the value as YAML; indices of lists are numbers, as in
            `model.layers.0.conv.maps=8`.

    Returns:
        The override, with the path of its key and its value.

    Raises:
        ExperimentError: if the text has another form or the value is not valid YAML.
    """
    source = f"--set {text}"
    key, equals, value = text.partition("=")
    path = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    if not equals or not all(part != "" for part in path):
        raise ExperimentError(f"{source}: expected KEY=VALUE, such as optimizer.lr=0.1")
    return Override(path, document(source, compose(source, value)).values if value.strip() else None, source)


def apply(target: Document, overrides: Sequence[Override]) -> None:
    """Puts the values into the document and records their sources as their places."""
    for override in overrides:
        _put(target, override)


def _put(target: Document, override: Override) -> None:
    path = override.path
    holder: Any = target.values
    for depth, part in enumerate(path[:-1]):
        step = path[: depth + 1]
        inner = _at(holder, part, override, step)
        if isinstance(inner, str) and not isinstance(path[depth + 1], int):
            # The short form `dataset: mnist` becomes a mapping, since it gets an option.
            inner = {"name": inner}
            target.places[(*step, "name")] = target.where(step)
            holder[part] = inner
        elif inner is None:
            holder[part] = inner = {}
            target.places[step] = target.key_places[step] = override.source
        holder = inner
    last = path[-1]
    _at(holder, last, override, path)
    holder[last] = override.value
    for known in [known for known in target.places if known[: len(path)] == path]:
        del target.places[known]
    target.places[path] = target.key_places[path] = override.source


def _at(holder: Any, part: str | int, override: Override, path: KeyPath) -> Any:
    """Returns the current value at `part`; None if a mapping does not have this key yet."""
    if isinstance(holder, dict):
        return holder.get(part)
    if isinstance(holder, list) and isinstance(part, int) and part < len(holder):
        return holder[part]
    key, parent = ".".join(map(str, path)), ".".join(map(str, path[:-1]))
    what = "not a mapping"
    if isinstance(holder, list):
        what = f"a list with indices 0 to {len(holder) - 1}" if holder else "an empty list"
    raise ExperimentError(f"{override.source}: there is no {key!r}: {parent} is {what}")
