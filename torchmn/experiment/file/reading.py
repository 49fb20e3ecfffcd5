"""From the values of a document to options that are known to be right, or to lines that say what is not."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file import registry
from torchmn.experiment.file.document import Document, KeyPath
from torchmn.experiment.file.fields import (
    SPLITS,
    LayerList,
    Nested,
    Reference,
    ReferenceList,
    ReferenceOrList,
    ReferenceOrNested,
    ReferencesBySplit,
)
from torchmn.experiment.file.registry import Options, Registry

MOST_LINES = 10
TAG = "#"
"""How the tag of an alternative begins, which pydantic puts into the place of an error."""

# What pydantic calls a mistake -> what a user of the file would have to write.
EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing_size": "a smaller number",
    "float_type": "a number", "finite_number": "a finite number", "bool_type": "true or false",
    "string_type": "text", "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}  # fmt: skip
BOUNDS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than"),
          "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}  # fmt: skip

Model = TypeVar("Model", bound=BaseModel)


@dataclass
class Reading:
    """One pass over a document, with all that was found wrong."""

    document: Document
    problems: list[tuple[str, str]] = field(default_factory=list)

    def problem(self, path: KeyPath, text: str, of_key: bool = False) -> None:
        self.problems.append((self.document.where(path, of_key), text))

    def finish(self) -> None:
        """Raise what was found, in the order of the file."""
        if self.problems:
            lines = list(dict.fromkeys(f"{where}: {text}" for where, text in sorted(self.problems, key=_in_file_order)))
            hidden = len(lines) - MOST_LINES
            more = [f"{self.document.name}: and {hidden} more"] if hidden > 0 else []
            raise ExperimentError("\n".join(lines[:MOST_LINES] + more))

    def options(self, cls: type[Model], value: Any, path: KeyPath) -> Model | None:
        """The options of a class, with everything in it resolved; None if there is a problem."""
        if not isinstance(value, dict):
            self.problem(path, f"expected {_name(path)} to be a mapping of keys to values, got {shown(value)}")
            return None
        before = len(self.problems)
        given = dict(value)
        for name, info in cls.model_fields.items():
            key = info.alias or name
            # `model:` with nothing behind it is not `model:` left out: what must be there says what it expects.
            if given.get(key) is not None or (key in given and info.is_required()):
                for mark in info.metadata:
                    given[key] = self._resolved(mark, given[key], (*path, key))
        try:
            made = cls.model_validate(given)
        except ValidationError as error:
            details = error.errors(include_url=False)
            unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
            # What is said of the whole (`model has no layers`) follows from a part of it that is wrong.
            parts_are_wrong = len(self.problems) > before
            for detail in details:
                of_whole = detail["type"] == "problem" and not detail["loc"]
                if not _is_misspelled(detail, unknown) and not (of_whole and parts_are_wrong):
                    self._explain(cls, detail, path)
            return None
        if isinstance(made, Options):
            made._where = self.document.where(path)
        return made if len(self.problems) == before else None

    def _resolved(self, mark: object, value: Any, path: KeyPath) -> Any:
        """What a field's value stands for, if the field is marked; otherwise the value."""
        if isinstance(mark, ReferencesBySplit) and isinstance(value, dict):
            return self._by_split(mark.registry, value, path)
        if isinstance(mark, ReferenceList):
            return self._list_of(mark.registry, value, path)
        if isinstance(mark, ReferenceOrList) and isinstance(value, list) and value:
            return self._list_of(mark.registry, value, path)
        if isinstance(mark, ReferenceOrNested):
            if isinstance(value, str) and not mark.registry.has(value):
                return value
            if not isinstance(value, str) and not (isinstance(value, dict) and "name" in value):
                return self.options(mark.cls, value, path)
        if isinstance(mark, Reference):
            return self.named(mark.registry, value, path)
        if isinstance(mark, LayerList):
            return self.layers(value, path)
        if isinstance(mark, Nested):
            shorthand = getattr(mark.cls, "shorthand", None)
            if shorthand is not None and not isinstance(value, dict):
                value = {shorthand: value}
            return self.options(mark.cls, value, path)
        return value

    def _list_of(self, kind: Registry, value: Any, path: KeyPath) -> list[Options | None] | None:
        if not isinstance(value, list):
            self.problem(path, f"expected {_name(path)} to be a list of {kind.plural}, got {shown(value)}")
            return None
        return [self.named(kind, item, (*path, place)) for place, item in enumerate(value)]

    def _by_split(self, kind: Registry, value: dict[Any, Any], path: KeyPath) -> dict[str, Any]:
        for split in [split for split in value if split not in SPLITS]:
            self.problem((*path, split), f"{_name(path)} has no key {str(split)!r}. {nearest(split, SPLITS)}", True)
        return {split: self._list_of(kind, value[split] or [], (*path, split)) for split in SPLITS if split in value}

    def named(self, kind: Registry, value: Any, path: KeyPath) -> Options | None:
        """`name`, or {name: ..., options}: the options of what the name stands for."""
        if isinstance(value, str):
            name, rest, name_path = value, {}, path
        elif isinstance(value, dict) and isinstance(value.get("name"), str):
            rest = dict(value)
            name, name_path = rest.pop("name"), (*path, "name")
        else:
            got = "no name in it" if isinstance(value, dict) else shown(value)
            self.problem(
                path, f"expected {_name(path)} to be the name of {_a(kind.noun)}, or a mapping with it, got {got}"
            )
            return None
        try:
            return self.options(kind.find(name), rest, path)
        except KeyError as error:
            self.problem(name_path, error.args[0])
            return None

    def layers(self, value: Any, path: KeyPath) -> list[Options | None]:
        """A list of `- kind: {options}`."""
        if not isinstance(value, list) or not value:
            got = "an empty list" if value == [] else shown(value)
            self.problem(path, f"expected {_name(path)} to be a list, as `- conv: {{maps: 20, kernel: 5}}`, got {got}")
            return []
        return [self._layer(item, (*path, place)) for place, item in enumerate(value)]

    def _layer(self, item: Any, path: KeyPath) -> Options | None:
        if isinstance(item, str):
            item = {item: {}}
            kind_path = path
        elif isinstance(item, dict) and len(item) == 1 and isinstance(next(iter(item)), str):
            kind_path = (*path, next(iter(item)))
        else:
            got = f"the keys {', '.join(map(str, item))}" if isinstance(item, dict) and item else shown(item)
            self.problem(path, f"expected one layer, as `conv: {{maps: 20, kernel: 5}}`, got {got}")
            return None
        kind, value = next(iter(item.items()))
        try:
            cls = registry.layers.find(kind)
        except KeyError as error:
            self.problem(kind_path, error.args[0], of_key=True)
            return None
        if value is None:
            value = {}
        elif not isinstance(value, dict) and cls.shorthand is not None:
            self.document.also_at(kind_path, (*kind_path, cls.shorthand), value)
            value = {cls.shorthand: value}
        return self.options(cls, value, kind_path)

    def _explain(self, cls: type[BaseModel], detail: ErrorDetails, path: KeyPath) -> None:
        """Note one of pydantic's errors in our words."""
        kind, context = detail["type"], detail.get("ctx", {})
        location = tuple(part for part in detail["loc"] if not str(part).startswith(TAG))
        here, last = (*path, *location), location[-1] if location else None
        own = getattr(cls, "kind", "")
        owner = f"{own}'s " if own else ""
        inner = _model_at(cls, location[:-1])
        if kind == "missing":
            what = _name(here[:-1]) if inner is not cls else own or _name(path)
            needs = "needs" if len(here) > 1 else "must have"
            self.problem(here[:-1], f"{what} {needs} the key {last!r}{_described(inner, last)}")
        elif kind == "extra_forbidden":
            what = _name(here[:-1]) if inner is not cls else own or _name(path)
            known = nearest(last, _keys(inner)) if _keys(inner) else "It takes no keys."
            self.problem(here, f"{what} has no key {str(last)!r}. {known}", of_key=True)
        elif kind == "invalid_key":
            self.problem((*path, *location), f"expected names as the keys of {own or _name(path)}, got {last!r}", True)
        elif kind == "problem":
            self.problem(here, f"{_name(here) if location else own or _name(path)} {context['text']}")
        else:
            what, got = _words(kind, context, detail), shown(detail["input"])
            hint = ""
            if kind == "literal_error" and isinstance(detail["input"], str):
                hint = f". {nearest(detail['input'], _choices(context))}"
            subject = f"{owner}{_name(location)}" if location else _name(path)
            self.problem(here, f"expected {subject} to be {what}, got {got}{hint}")


def _is_misspelled(detail: ErrorDetails, unknown: list[tuple[Any, ...]]) -> bool:
    """Whether a key is missing only because it is there under another name, which is said anyway."""
    if detail["type"] != "missing":
        return False
    *holder, name = detail["loc"]
    beside = [str(other[-1]) for other in unknown if list(other[:-1]) == holder]
    return bool(difflib.get_close_matches(str(name), beside, n=1, cutoff=0.5))


def _words(kind: str, context: dict[str, Any], detail: ErrorDetails) -> str:
    if kind == "expected":
        return context["what"]
    if kind in BOUNDS:
        bound, words = BOUNDS[kind]
        return f"{words} {context[bound]:g}"
    if kind == "literal_error":
        return f"one of {', '.join(_choices(context))}"
    if kind == "too_short":
        return f"a list of at least {context['min_length']}"
    if kind == "too_long":
        return f"a list of at most {context['max_length']}"
    return EXPECTED.get(kind) or detail["msg"][:1].lower() + detail["msg"][1:]


def _choices(context: dict[str, Any]) -> list[str]:
    return [word.strip("'\" ") for word in context["expected"].replace(" or ", ",").split(",")]


def _keys(cls: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in cls.model_fields.items()]


def _described(cls: type[BaseModel], key: Any) -> str:
    for name, info in cls.model_fields.items():
        if key in (name, info.alias) and info.description:
            return f": {info.description}"
    return ""


def _model_at(cls: type[BaseModel], location: tuple[Any, ...]) -> type[BaseModel]:
    """The class of options that stands at a place inside of another's: those of `momentum` in an optimizer."""
    for part in location:
        info = next((i for n, i in cls.model_fields.items() if part in (n, i.alias)), None)
        found = [c for c in _classes(info.annotation) if issubclass(c, BaseModel)] if info else []
        cls = found[0] if found else cls
    return cls


def _classes(annotation: Any) -> list[type]:
    """The classes that a type is made of: those of `float | Ramp | None`, for example."""
    parts = get_args(annotation)
    if not parts:  # asked first: to Python 3.10, list[str] is a type too
        return [annotation] if isinstance(annotation, type) else []
    return [found for part in parts for found in _classes(part)]


def _name(path: tuple[Any, ...]) -> str:
    names = [str(part) for part in path if isinstance(part, str)]
    return names[-1] if names else "the file"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def shown(value: Any) -> str:
    """A value in a few words, for messages."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _in_file_order(problem: tuple[str, str]) -> tuple[int, int, int]:
    parts = problem[0].rsplit(":", 2)
    if len(parts) == 3 and parts[1].isdecimal() and parts[2].isdecimal():
        return 0, int(parts[1]), int(parts[2])
    return 1, 0, 0
