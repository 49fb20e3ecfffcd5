"""Loads experiment files as validated `Experiment` objects, and writes experiments as files."""

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
from torchmn.experiment.file.registry import Layer, Options
from torchmn.experiment.file.tagged_value import Range
from torchmn.experiment.file.validation import Validation
from torchmn.experiment.neon import Converted
from torchmn.experiment.vocabulary.layers.user_module import import_module
from torchmn.experiment.vocabulary.schema import Experiment, ModelSection


def load(path: str | os.PathLike[str], overrides: Sequence[Override] = ()) -> Experiment:
    """Returns the experiment that a file describes.

    The Python modules listed in `imports:` are imported, which runs their code: load only files that you trust.

    Args:
        path: the file, in the format of TorchMN or of neon.
        overrides: values that replace those of the file, such as `parse_set("optimizer.lr=0.1")`.

    Returns:
        The validated experiment.

    Raises:
        ExperimentError: with one line per error: `file:line:column: expected ..., got ...`.
    """
    return read(str(path), documents.read_text(Path(path)), overrides)


def read(name: str, text: str, overrides: Sequence[Override] = ()) -> Experiment:
    """Returns the experiment in a text, as `load`; `name` is the file name in messages."""
    return check(parse(name, text).document, overrides)


def parse(name: str, text: str) -> Converted:
    """Returns the values of a text; for neon's format also notes on keys that no longer have a meaning."""
    root = documents.compose(name, text)
    return (
        neon.convert(name, root) if neon.is_neon(root) else Converted(documents.document(name, root), [], is_neon=False)
    )


def check(document: Document, overrides: Sequence[Override] = (), run_imports: bool = True) -> Experiment:
    """Returns the experiment that a document describes; imports its modules unless `run_imports` is False."""
    if not isinstance(document.values, dict):
        raise ExperimentError(
            f"{document.where(())}: expected keys with values, such as `epochs: 5`, got "
            f"{'a list' if isinstance(document.values, list) else repr(document.values)[:60]}"
        )
    overriding.apply(document, overrides)
    validation = Validation(document)
    _check_ranges(validation, document.values, ())
    validation.raise_problems()
    imports = document.values.get("imports") if run_imports else None
    for index, module in enumerate(imports if isinstance(imports, list) else []):
        if isinstance(module, str):
            try:
                import_module(module)
            except ValueError as error:
                validation.problem(("imports", index), str(error))
    validation.raise_problems()  # before names are validated that a failed import should have registered
    experiment = validation.section(Experiment, document.values, ())
    validation.raise_problems()
    assert experiment is not None
    return experiment


def read_model(document: Document) -> ModelSection:
    """Returns the model that a document describes, without running its imports.

    The names that it uses must be registered already, by the imports of another file.
    """
    validation = Validation(document)
    values = document.values.get("model") if isinstance(document.values, dict) else None
    model = validation.section(ModelSection, values, ("model",))
    validation.raise_problems()
    assert model is not None
    return model


def _check_ranges(validation: Validation, value: object, path: KeyPath) -> None:
    """Records a problem for each `!hyperopt` range of a neon file that no override replaced."""
    if isinstance(value, Range):
        key = ".".join(map(str, path))
        validation.problem(
            path,
            f"!hyperopt {value.text} is a range, and hyperparameter search is not supported: set a value, such as "
            f"--set {key}={value.example}",
        )
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check_ranges(validation, item, (*path, key))


def plain(value: Any) -> Any:
    """Returns options as the plain values of a file, with all defaults written out."""
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
    """Returns the fields as plain values, without those that are None by default."""
    result = {}
    for name, info in type(value).model_fields.items():
        item = getattr(value, name)
        # A default that YAML cannot represent, such as a class, is set again by the code of the registered name.
        omitted = name not in value.model_fields_set and _unwritable(item, name)
        if omitted or (item is None and info.get_default(call_default_factory=True) is None):
            continue
        # In `autoencoder: {maps: 8}` and `module: {name: my.Net}` the kind is the key, and not an option `name`.
        is_nested = any(isinstance(mark, Nested) for mark in info.metadata)
        result[info.alias or name] = _fields(item) if is_nested and isinstance(item, BaseModel) else plain(item)
    return result


def dump(experiment: Experiment) -> str:
    """Returns the experiment as the YAML text of a file that `load` reads as an equal experiment.

    Args:
        experiment: the experiment, with defaults and overrides, which are all written out.

    Returns:
        YAML text.
    """
    return yaml.dump(plain(experiment), Dumper=Dumper, sort_keys=False, width=100, default_flow_style=None)


def check_round_trip(experiment: Experiment) -> None:
    """Checks that the output of `dump` is read as an equal experiment, which evaluation and --resume require.

    Args:
        experiment: as it was loaded.

    Raises:
        ExperimentError: with the first key whose value changes.
    """
    consequence = "the run could not be evaluated or resumed, and is not started"
    unwritable = _unwritable(plain(experiment), "")
    if unwritable is not None:
        raise ExperimentError(
            f"{unwritable}, which YAML cannot represent: {consequence}. Use numbers, text, lists and mappings."
        )
    try:
        again = read("experiment.yaml", dump(experiment))
    except ExperimentError as error:
        raise ExperimentError(f"the saved experiment cannot be read: {consequence}\n{error}") from error
    difference = _difference(experiment, again, "")
    if difference is not None:
        raise ExperimentError(f"{difference} when it is saved and read again: {consequence}.")


def _unwritable(value: object, key: str) -> str | None:
    """Returns a description of the first part of a value that YAML cannot represent; None if there is none."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, BaseModel):
        return None
    if type(value) is dict or type(value) is list:
        items = value.items() if type(value) is dict else enumerate(value)
        inner = (_unwritable(item, f"{key}.{name}".lstrip(".")) for name, item in items)
        return next((found for found in inner if found is not None), None)
    return f"{key} is {value!r}, a {type(value).__module__}.{type(value).__qualname__}"


def _difference(value: Any, again: Any, key: str) -> str | None:
    """Returns a description of the first difference between two values; None if they are equal."""
    if type(value) is not type(again):
        return f"{key} changes from {value!r} to {again!r}"
    inner: list[tuple[Any, Any, Any]] = []
    if isinstance(value, BaseModel):
        inner = [(getattr(value, name), getattr(again, name), name) for name in type(value).model_fields]
    elif isinstance(value, dict):
        inner = [(value.get(name), again.get(name), name) for name in {**value, **again}]
    elif isinstance(value, list | tuple) and len(value) == len(again):
        inner = [(one, other, index) for index, (one, other) in enumerate(zip(value, again, strict=True))]
    elif value != again and (value == value or again == again):  # two NaN count as equal
        return f"{key} changes from {value!r} to {again!r}"
    found = (_difference(one, other, f"{key}.{name}".lstrip(".")) for one, other, name in inner)
    return next((text for text in found if text is not None), None)
