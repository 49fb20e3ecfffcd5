"""load: an experiment file in, a checked Experiment out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from torchmn.errors import ExperimentError
from torchmn.experiment import document as documents
from torchmn.experiment import neon
from torchmn.experiment import overrides as overriding
from torchmn.experiment.document import Document, Dumper, KeyPath
from torchmn.experiment.layers.own_module import import_module
from torchmn.experiment.neon import Converted
from torchmn.experiment.neon.said import Range
from torchmn.experiment.overrides import Override
from torchmn.experiment.reading import Reading
from torchmn.experiment.registry import Layer, Options
from torchmn.experiment.schema import Experiment, Section


def load(path: str | os.PathLike[str], overrides: Sequence[Override] = ()) -> Experiment:
    """The experiment in a file, with the values of `overrides` in the place of its own.

    What is wrong with it is an ExperimentError, a line for each mistake: `file:line:column: expected ..., got ...`.
    """
    return read(str(path), documents.read_text(Path(path)), overrides)


def read(name: str, text: str, overrides: Sequence[Override] = ()) -> Experiment:
    """As `load`, of a text; `name` stands for the file in messages."""
    return check(parse(name, text).document, overrides)


def parse(name: str, text: str) -> Converted:
    """The values of a text in our format or neon's, and in that case notes on what has no meaning today."""
    root = documents.compose(name, text)
    return (
        neon.convert(name, root) if neon.is_neon(root) else Converted(documents.document(name, root), [], is_neon=False)
    )


def check(document: Document, overrides: Sequence[Override] = ()) -> Experiment:
    """The experiment that the values of a document describe."""
    if not isinstance(document.values, dict):
        raise ExperimentError(
            f"{document.where(())}: expected keys with values, as `epochs: 5`, got "
            f"{'a list' if isinstance(document.values, list) else repr(document.values)[:60]}"
        )
    overriding.apply(document, overrides)
    reading = Reading(document)
    _refuse_ranges(reading, document.values, ())
    reading.finish()
    imports = document.values.get("imports")
    for place, module in enumerate(imports if isinstance(imports, list) else []):
        if isinstance(module, str):
            try:
                import_module(module)
            except ValueError as error:
                reading.problem(("imports", place), str(error))
    reading.finish()  # words that a module was to register are no mistakes of their own
    experiment = reading.options(Experiment, document.values, ())
    reading.finish()
    assert experiment is not None
    return experiment


def _refuse_ranges(reading: Reading, value: Any, path: KeyPath) -> None:
    """Note each value of a neon file that a search was to find, and that nobody has said."""
    if isinstance(value, Range):
        key = ".".join(map(str, path))
        reading.problem(
            path,
            f"!hyperopt {value.text} is a range for a search that is no longer there: say a value, as --set "
            f"{key}={value.example}",
        )
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_ranges(reading, item, (*path, key))


def plain(value: Any) -> Any:
    """Options as the values that a file would say, with every default written out."""
    if isinstance(value, Layer):
        return {value.kind: _fields(value)}
    if isinstance(value, Options):
        fields = _fields(value)
        return {"name": value.kind, **fields} if value.kind != "module" else fields
    if isinstance(value, Section | BaseModel):
        return _fields(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def _fields(value: BaseModel) -> dict[str, Any]:
    """What is said: fields without a value are left out."""
    named = ((info.alias or name, getattr(value, name)) for name, info in type(value).model_fields.items())
    return {name: plain(item) for name, item in named if item is not None}


def dump(experiment: Experiment) -> str:
    """The experiment as a file that `load` reads again."""
    return yaml.dump(plain(experiment), Dumper=Dumper, sort_keys=False, width=100, default_flow_style=None)
