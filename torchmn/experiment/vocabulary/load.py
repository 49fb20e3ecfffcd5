"""load: an experiment file in, a checked Experiment out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from torchmn.errors import ExperimentError
from torchmn.experiment import neon
from torchmn.experiment.file import document as documents
from torchmn.experiment.file import overrides as overriding
from torchmn.experiment.file.document import Document, Dumper, KeyPath
from torchmn.experiment.file.fields import Nested
from torchmn.experiment.file.overrides import Override
from torchmn.experiment.file.reading import Reading
from torchmn.experiment.file.registry import Layer, Options
from torchmn.experiment.neon import Converted
from torchmn.experiment.neon.tagged_value import Range
from torchmn.experiment.vocabulary.layers.own_module import import_module
from torchmn.experiment.vocabulary.schema import Experiment, Model


def load(path: str | os.PathLike[str], overrides: Sequence[Override] = ()) -> Experiment:
    """The experiment in a file, with the values of `overrides` in the place of its own.

    The Python modules in its `imports:` are imported, which runs their code: load files that you trust.

    Args:
        path: the file, in our format or neon's.
        overrides: values for some of its keys, as `parse_set("optimizer.lr=0.1")`.

    Raises:
        ExperimentError: with a line for each mistake in it: `file:line:column: expected ..., got ...`.
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


def check(document: Document, overrides: Sequence[Override] = (), run_imports: bool = True) -> Experiment:
    """The experiment that the values of a document describe; its imports are run unless `run_imports` is False."""
    if not isinstance(document.values, dict):
        raise ExperimentError(
            f"{document.where(())}: expected keys with values, as `epochs: 5`, got "
            f"{'a list' if isinstance(document.values, list) else repr(document.values)[:60]}"
        )
    overriding.apply(document, overrides)
    reading = Reading(document)
    _refuse_ranges(reading, document.values, ())
    reading.finish()
    imports = document.values.get("imports") if run_imports else None
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


def model_in(document: Document) -> Model:
    """The model that a document describes, read without its imports, so that none of its code runs.

    Words of a user's own must be registered already, by the imports of another file.
    """
    reading = Reading(document)
    values = document.values.get("model") if isinstance(document.values, dict) else None
    model = reading.options(Model, values, ("model",))
    reading.finish()
    assert model is not None
    return model


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
        return {"name": value.kind, **_fields(value)}
    if isinstance(value, BaseModel):
        return _fields(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def _fields(value: BaseModel) -> dict[str, Any]:
    """What is said; where nothing is, a reader finds the default again."""
    found = {}
    for name, info in type(value).model_fields.items():
        item = getattr(value, name)
        unsaid = name not in value.model_fields_set and _unwritable(item, name)  # a word's own code holds it
        if unsaid or (item is None and info.get_default(call_default_factory=True) is None):
            continue
        # `autoencoder: {maps: 8}` and `module: {name: my.Net}` have their word as the key, and not beside the options.
        is_nested = any(isinstance(mark, Nested) for mark in info.metadata)
        written = _fields(item) if is_nested and isinstance(item, BaseModel) else plain(item)
        found[info.alias or name] = written
    return found


def dump(experiment: Experiment) -> str:
    """The experiment as a file that `load` reads again."""
    return yaml.dump(plain(experiment), Dumper=Dumper, sort_keys=False, width=100, default_flow_style=None)


def check_readable(experiment: Experiment) -> None:
    """Check that what `dump` writes is read again as the same experiment: a run needs that after its training.

    Raises:
        ExperimentError: with the first key whose value does not come back.
    """
    refusal = "its run could be neither evaluated nor resumed, and is not started"
    foreign = _unwritable(plain(experiment), "")
    if foreign is not None:
        raise ExperimentError(f"{foreign}, which no YAML file can hold: {refusal}. Use numbers, text, lists, mappings.")
    try:
        again = read("experiment.yaml", dump(experiment))
    except ExperimentError as error:
        raise ExperimentError(f"the experiment can not be read again once it is written: {refusal}\n{error}") from error
    apart = _changed(experiment, again, "")
    if apart is not None:
        raise ExperimentError(f"{apart}, once it is written and read again: {refusal}.")


def _unwritable(value: Any, key: str) -> str | None:
    """The first part of a value that is not as a file would hold it, in words; None if there is none."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, BaseModel):
        return None
    if type(value) is dict or type(value) is list:
        items = value.items() if type(value) is dict else enumerate(value)
        inner = (_unwritable(item, f"{key}.{name}".lstrip(".")) for name, item in items)
        return next((found for found in inner if found is not None), None)
    return f"{key} is {value!r}, a {type(value).__module__}.{type(value).__qualname__}"


def _changed(value: Any, again: Any, key: str) -> str | None:
    """The first difference between two values, in words; None if there is none."""
    if type(value) is not type(again):
        return f"{key} is {again!r} and no longer {value!r}"
    inner: list[tuple[Any, Any, Any]] = []
    if isinstance(value, BaseModel):
        inner = [(getattr(value, name), getattr(again, name), name) for name in type(value).model_fields]
    elif isinstance(value, dict):
        inner = [(value.get(name), again.get(name), name) for name in {**value, **again}]
    elif isinstance(value, list | tuple) and len(value) == len(again):
        inner = [(one, other, place) for place, (one, other) in enumerate(zip(value, again, strict=True))]
    elif value != again and (value == value or again == again):  # NaN is not itself
        return f"{key} is {again!r} and no longer {value!r}"
    found = (_changed(one, other, f"{key}.{name}".lstrip(".")) for one, other, name in inner)
    return next((text for text in found if text is not None), None)
