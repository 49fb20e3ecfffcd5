"""The JSON schema of experiment files, from the same classes that check them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from torchmn.experiment.file import registry
from torchmn.experiment.file.fields import DEFINITION
from torchmn.experiment.file.registry import Options, Registry
from torchmn.experiment.vocabulary.autoencoder import Autoencoder
from torchmn.experiment.vocabulary.layers.own_module import OwnModule
from torchmn.experiment.vocabulary.schedules import Schedule
from torchmn.experiment.vocabulary.schema import Experiment, Grid, Model, Parallel


def json_schema() -> dict[str, Any]:
    """A JSON schema (2020-12) that accepts what `load` accepts, as far as a schema can say it."""
    definitions: dict[str, Any] = {}
    top = _schema(Experiment, definitions)
    for section in (Model, Parallel, Grid, OwnModule, Autoencoder, Schedule):
        definitions[section.__name__] = _schema(section, definitions)
    definitions["OwnModule"] = {"anyOf": [{"type": "string"}, definitions["OwnModule"]]}
    for kind in registry.KINDS:
        definitions[kind.noun] = _layer(definitions) if kind is registry.layers else _named(kind, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "TorchMN experiment", **top,
            "$defs": definitions}  # fmt: skip


def _schema(cls: type[BaseModel], definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one class; classes that stand inside of it go to the definitions."""
    schema = cls.model_json_schema(ref_template="#/$defs/{model}")
    definitions.update(schema.pop("$defs", {}))
    schema.pop("title", None)
    return _referring(schema)


def _referring(schema: Any) -> Any:
    """The schema with references in the places that name a definition: pydantic refuses those that it did not make."""
    if isinstance(schema, list):
        return [_referring(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _referring(value) for key, value in schema.items() if key != DEFINITION}
    return {**made, "$ref": f"#/$defs/{schema[DEFINITION]}"} if DEFINITION in schema else made


def _named(kind: Registry, definitions: dict[str, Any]) -> dict[str, Any]:
    """`name`, or {name: ..., options}."""
    choices: list[dict[str, Any]] = [{"enum": [name for name, cls in kind.entries.items() if not _required(cls)]}]
    for name, cls in kind.entries.items():
        schema = _schema(cls, definitions)
        properties = {"name": {"const": name}, **schema.get("properties", {})}
        required = ["name", *schema.get("required", [])]
        choices.append({**schema, "properties": properties, "required": required})
    return {"anyOf": choices}


def _layer(definitions: dict[str, Any]) -> dict[str, Any]:
    """`kind`, or {kind: options}."""
    choices: list[dict[str, Any]] = [
        {"enum": [name for name, cls in registry.layers.entries.items() if not _required(cls)]}
    ]
    for name, cls in registry.layers.entries.items():
        schema = _schema(cls, definitions)
        forms: list[dict[str, Any]] = [schema]
        if cls.shorthand is not None:
            forms.append(schema["properties"][cls.shorthand])
        if not _required(cls):
            forms.append({"type": "null"})
        choices.append(
            {
                "type": "object",
                "properties": {name: {"anyOf": forms} if len(forms) > 1 else schema},
                "required": [name],
                "additionalProperties": False,
            }
        )
    return {"anyOf": choices}


def _required(cls: type[Options]) -> bool:
    return any(info.is_required() for info in cls.model_fields.values())
