"""Values from the command line in the place of those of the file: --set optimizer.lr=0.1, --epochs 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchmn.errors import ExperimentError
from torchmn.experiment.file.document import Document, KeyPath, compose, document


@dataclass(frozen=True)
class Override:
    """A value, where it goes, and how the user said it (which is where errors point to)."""

    path: KeyPath
    value: Any
    said: str


def parse_set(text: str) -> Override:
    """What `--set KEY.KEY=VALUE` says; the value is read as in a file."""
    said = f"--set {text}"
    key, equals, value = text.partition("=")
    path = tuple(int(part) if part.isdecimal() else part for part in key.strip().split("."))
    if not equals or not all(part != "" for part in path):
        raise ExperimentError(f"{said}: expected KEY=VALUE, as optimizer.lr=0.1")
    return Override(path, document(said, compose(said, value)).values if value.strip() else None, said)


def apply(target: Document, overrides: Sequence[Override]) -> None:
    """Put the values into the document, and note for each where it came from."""
    for override in overrides:
        _put(target, override)


def _put(target: Document, override: Override) -> None:
    path = override.path
    holder: Any = target.values
    for depth, part in enumerate(path[:-1]):
        step = path[: depth + 1]
        inner = _at(holder, part, override, step)
        if isinstance(inner, str) and not isinstance(path[depth + 1], int):
            # The short form, `dataset: mnist`: the name of what now gets an option.
            inner = {"name": inner}
            target.places[(*step, "name")] = target.where(step)
            holder[part] = inner
        elif inner is None:
            holder[part] = inner = {}
            target.places[step] = target.key_places[step] = override.said
        holder = inner
    last = path[-1]
    _at(holder, last, override, path)
    holder[last] = override.value
    for known in [known for known in target.places if known[: len(path)] == path]:
        del target.places[known]
    target.places[path] = target.key_places[path] = override.said


def _at(holder: Any, part: str | int, override: Override, path: KeyPath) -> Any:
    """What stands at `part` now: nothing, where a mapping has no such key yet."""
    so_far = ".".join(map(str, path))
    if isinstance(holder, dict):
        return holder.get(part)
    if isinstance(holder, list) and isinstance(part, int) and part < len(holder):
        return holder[part]
    what = (
        f"a list of {len(holder)}: its places are 0 to {len(holder) - 1}" if isinstance(holder, list) else "no mapping"
    )
    raise ExperimentError(f"{override.said}: there is no {so_far!r}: what stands there is {what}")
