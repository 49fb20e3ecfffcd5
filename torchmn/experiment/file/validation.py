"""Validates the values of a document: converts them to options, or to error messages with file, line and column."""

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

MAX_LINES = 10
IN_SECTIONS = {
    **dict.fromkeys(("lr", "momentum", "weight_decay", "schedule"), "optimizer"),
    **dict.fromkeys(("layers", "cost", "module", "target"), "model"),
    **dict.fromkeys(("sample", "validation", "path"), "dataset"),
    **dict.fromkeys(("mode", "grid"), "parallel"),
}
"""Keys that are often written at the top of a file, and their sections."""
TAG = "#"
"""Prefix of the tags of a union's alternatives, which pydantic adds to the location of an error."""

# Pydantic's error type -> the expected value, in terms of the file.
EXPECTED = {
    "int_type": "an integer", "int_from_float": "an integer", "int_parsing_size": "a smaller number",
    "float_type": "a number", "finite_number": "a finite number", "bool_type": "true or false",
    "string_type": "text", "list_type": "a list", "tuple_type": "a list", "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
}  # fmt: skip
BOUNDS = {"greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than"),
          "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}  # fmt: skip

SectionT = TypeVar("SectionT", bound=BaseModel)


@dataclass
class Validation:
    """Validates one document and collects all problems in it."""

    document: Document
    problems: list[tuple[str, str]] = field(default_factory=list)

    def problem(self, path: KeyPath, text: str, of_key: bool = False) -> None:
        self.problems.append((self.document.where(path, of_key), text))

    def raise_problems(self) -> None:
        """Raises an ExperimentError with the problems in the order of the file, if there are any."""
        if self.problems:
            lines = list(dict.fromkeys(f"{where}: {text}" for where, text in sorted(self.problems, key=_in_file_order)))
            hidden = len(lines) - MAX_LINES
            more = [f"{self.document.name}: and {hidden} more"] if hidden > 0 else []
            raise ExperimentError("\n".join(lines[:MAX_LINES] + more))

    def section(self, cls: type[SectionT], value: object, path: KeyPath) -> SectionT | None:
        """Returns an instance of `cls` with all references in it resolved; None if there is a problem."""
        if not isinstance(value, dict):
            self.problem(path, f"expected {_name(path)} to be a mapping of keys to values, got {_describe(value)}")
            return None
        before = len(self.problems)
        values = dict(value)
        for name, info in cls.model_fields.items():
            key = info.alias or name
            # `model:` without a value differs from no `model:`: a required field then reports what it expects.
            if values.get(key) is not None or (key in values and info.is_required()):
                for mark in info.metadata:
                    values[key] = self._resolve(mark, values[key], (*path, key))
        try:
            result = cls.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
            # A problem of the section as a whole ("model has no layers") may follow from one of its parts.
            parts_are_wrong = len(self.problems) > before
            for detail in details:
                of_whole = detail["type"] == "invalid" and not detail["loc"]
                if not _is_misspelled(detail, unknown) and not (of_whole and parts_are_wrong):
                    self._report(cls, detail, path)
            return None
        if isinstance(result, Options):
            result._where = self.document.where(path)
        return result if len(self.problems) == before else None

    def _resolve(self, mark: object, value: object, path: KeyPath) -> object:
        """Returns the options that a field's value refers to, as its mark specifies; without a mark, the value."""
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
                return self.section(mark.cls, value, path)
        if isinstance(mark, Reference):
            return self._reference(mark.registry, value, path)
        if isinstance(mark, LayerList):
            return self._layers(value, path)
        if isinstance(mark, Nested):
            shorthand = getattr(mark.cls, "shorthand", None)
            if shorthand is not None and not isinstance(value, dict):
                value = {shorthand: value}
            return self.section(mark.cls, value, path)
        return value

    def _list_of(self, kind: Registry, value: object, path: KeyPath) -> list[Options | None] | None:
        if not isinstance(value, list):
            self.problem(path, f"expected {_name(path)} to be a list of {kind.plural}, got {_describe(value)}")
            return None
        return [self._reference(kind, item, (*path, index)) for index, item in enumerate(value)]

    def _by_split(
        self, kind: Registry, value: dict[str, object], path: KeyPath
    ) -> dict[str, list[Options | None] | None]:
        for split in [split for split in value if split not in SPLITS]:
            self.problem((*path, split), f"{_name(path)} has no key {str(split)!r}. {nearest(split, SPLITS)}", True)
        return {split: self._list_of(kind, value[split] or [], (*path, split)) for split in SPLITS if split in value}

    def _reference(self, kind: Registry, value: object, path: KeyPath) -> Options | None:
        """Returns the options for `name` or {name: ..., options}; or {torchmetrics: ...}, whose key is the name."""
        if isinstance(value, str):
            name, rest, name_path = value, {}, path
        elif isinstance(value, dict) and isinstance(value.get("name"), str):
            rest = dict(value)
            name, name_path = rest.pop("name"), (*path, "name")
        elif isinstance(value, dict) and (own_name := kind.named_by_key(value)) is not None:
            rest, name, name_path = value, own_name, (*path, own_name)
        else:
            got = "a mapping without it" if isinstance(value, dict) else _describe(value)
            noun = f"{'an' if kind.noun[0] in 'aeiou' else 'a'} {kind.noun}"
            self.problem(path, f"expected {_name(path)} to be the name of {noun}, or a mapping with `name`, got {got}")
            return None
        try:
            return self.section(kind.find(name), rest, path)
        except KeyError as error:
            self.problem(name_path, error.args[0])
            return None

    def _layers(self, value: object, path: KeyPath) -> list[Options | None]:
        """Returns the options of each layer in a list of `- kind: {options}`."""
        if not isinstance(value, list) or not value:
            got = "an empty list" if value == [] else _describe(value)
            example = "`- conv: {maps: 20, kernel: 5}`"
            self.problem(path, f"expected {_name(path)} to be a list of layers, such as {example}, got {got}")
            return []
        return [self._layer(item, (*path, index)) for index, item in enumerate(value)]

    def _layer(self, item: object, path: KeyPath) -> Options | None:
        if isinstance(item, str):
            item = {item: {}}
            kind_path = path
        elif isinstance(item, dict) and len(item) == 1 and isinstance(next(iter(item)), str):
            kind_path = (*path, next(iter(item)))
        else:
            got = f"the keys {', '.join(map(str, item))}" if isinstance(item, dict) and item else _describe(item)
            self.problem(path, f"expected one layer, such as `conv: {{maps: 20, kernel: 5}}`, got {got}")
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
            self.document.copy_places(kind_path, (*kind_path, cls.shorthand), value)
            value = {cls.shorthand: value}
        return self.section(cls, value, kind_path)

    def _report(self, cls: type[BaseModel], detail: ErrorDetails, path: KeyPath) -> None:
        """Records one of pydantic's errors as a problem, in terms of the file."""
        kind, context = detail["type"], detail.get("ctx", {})
        location = tuple(part for part in detail["loc"] if not str(part).startswith(TAG))
        here, last = (*path, *location), location[-1] if location else None
        kind_name = getattr(cls, "kind", "")
        name = kind_name or _name(path)
        inner = _model_at(cls, location[:-1])
        section = name if inner is cls else _name(here[:-1])
        if kind == "missing":
            needs = "needs" if len(here) > 1 else "must have"
            self.problem(here[:-1], f"{section} {needs} the key {last!r}{_described(inner, last)}")
        elif kind == "extra_forbidden":
            known = nearest(last, _keys(inner)) if _keys(inner) else "It takes no keys."
            if len(here) == 1 and str(last) in IN_SECTIONS:
                known = f"Did you mean '{IN_SECTIONS[str(last)]}.{last}'?"
            self.problem(here, f"{section} has no key {str(last)!r}. {known}", of_key=True)
        elif kind == "invalid_key":
            self.problem(here, f"expected names as the keys of {name}, got {last!r}", of_key=True)
        elif kind == "invalid":
            self.problem(here, f"{_name(here) if location else name} {context['text']}")
        else:
            what, got = _expected(kind, context, detail), _describe(detail["input"])
            hint = ""
            if kind == "literal_error" and isinstance(detail["input"], str):
                hint = f". {nearest(detail['input'], _choices(context))}"
            owner = f"{kind_name}'s " if kind_name else ""
            subject = f"{owner}{_name(location)}" if location else _name(path)
            self.problem(here, f"expected {subject} to be {what}, got {got}{hint}")


def _is_misspelled(detail: ErrorDetails, unknown: list[tuple[int | str, ...]]) -> bool:
    """Returns whether a missing key is present under a similar, unknown name, which is reported already."""
    if detail["type"] != "missing":
        return False
    *parent, name = detail["loc"]
    siblings = [str(other[-1]) for other in unknown if list(other[:-1]) == parent]
    return bool(difflib.get_close_matches(str(name), siblings, n=1, cutoff=0.5))


def _expected(kind: str, context: dict[str, Any], detail: ErrorDetails) -> str:
    if kind == "wrong_value":
        return context["expected"]
    if kind in BOUNDS:
        bound, phrase = BOUNDS[kind]
        return f"{phrase} {context[bound]:g}"
    if kind == "literal_error":
        return f"one of {', '.join(_choices(context))}"
    if kind == "too_short":
        return f"a list of at least {context['min_length']} items"
    if kind == "too_long":
        return f"a list of at most {context['max_length']} items"
    return EXPECTED.get(kind) or detail["msg"][:1].lower() + detail["msg"][1:]


def _choices(context: dict[str, Any]) -> list[str]:
    return [word.strip("'\" ") for word in context["expected"].replace(" or ", ",").split(",")]


def _keys(cls: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in cls.model_fields.items()]


def _described(cls: type[BaseModel], key: object) -> str:
    for name, info in cls.model_fields.items():
        if key in (name, info.alias) and info.description:
            return f": {info.description}"
    return ""


def _model_at(cls: type[BaseModel], location: tuple[object, ...]) -> type[BaseModel]:
    """Returns the class of the nested section at `location` in `cls`, such as that of `momentum` in an optimizer."""
    for part in location:
        info = next((i for n, i in cls.model_fields.items() if part in (n, i.alias)), None)
        found = [c for c in _classes(info.annotation) if issubclass(c, BaseModel)] if info else []
        cls = found[0] if found else cls
    return cls


def _classes(annotation: object) -> list[type]:
    """Returns the classes in a type such as `float | Ramp | None`."""
    parts = get_args(annotation)
    if not parts:  # checked first: in Python 3.10, isinstance(list[str], type) is true
        return [annotation] if isinstance(annotation, type) else []
    return [found for part in parts for found in _classes(part)]


def _name(path: tuple[object, ...]) -> str:
    names = [str(part) for part in path if isinstance(part, str)]
    return names[-1] if names else "the file"


def _describe(value: object) -> str:
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
