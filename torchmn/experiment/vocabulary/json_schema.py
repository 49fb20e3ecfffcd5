"""Generates the JSON schema of experiment files from the classes that validate them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from torchmn.experiment.file import registry
from torchmn.experiment.file.fields import DEFINITION
from torchmn.experiment.file.registry import Options, Registry
from torchmn.experiment.vocabulary.autoencoder import Autoencoder
from torchmn.experiment.vocabulary.layers.options import LayerOptimizer
from torchmn.experiment.vocabulary.layers.user_module import UserModule
from torchmn.experiment.vocabulary.schedules import Schedule
from torchmn.experiment.vocabulary.schema import Experiment, Grid, ModelSection, Parallel

JsonSchema = dict[str, Any]


def json_schema() -> JsonSchema:
    """Returns a JSON schema (2020-12) that accepts what `load` accepts, as far as a schema can express it."""
    definitions: JsonSchema = {}
    top = _schema(Experiment, definitions)
    for section in (ModelSection, Parallel, Grid, UserModule, Autoencoder, Schedule, LayerOptimizer):
        definitions[section.__name__] = _schema(section, definitions)
    definitions["UserModule"] = {"anyOf": [{"type": "string"}, definitions["UserModule"]]}
    for kind in registry.KINDS:
        definitions[kind.noun] = _layer(definitions) if kind is registry.layers else _reference(kind, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "TorchMN experiment", **top,
            "$defs": definitions}  # fmt: skip


def _schema(cls: type[BaseModel], definitions: JsonSchema) -> JsonSchema:
    """Returns the schema of one class; adds classes nested in it to the definitions."""
    schema = cls.model_json_schema(ref_template="#/$defs/{model}")
    definitions.update(schema.pop("$defs", {}))
    schema.pop("title", None)
    return _with_references(schema)


def _with_references(schema: Any) -> Any:
    """Replaces `x-definition` by `$ref`; pydantic rejects references to definitions that it did not create."""
    if isinstance(schema, list):
        return [_with_references(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _with_references(value) for key, value in schema.items() if key != DEFINITION}
    return {**result, "$ref": f"#/$defs/{schema[DEFINITION]}"} if DEFINITION in schema else result


def _reference(kind: Registry, definitions: JsonSchema) -> JsonSchema:
    """Returns the schema of `name` or {name: ..., options}."""
    choices: list[JsonSchema] = [{"enum": [name for name, cls in kind.entries.items() if not _required(cls)]}]
    for name, cls in kind.entries.items():
        schema = _schema(cls, definitions)
        properties = {"name": {"const": name}, **schema.get("properties", {})}
        # `{torchmetrics: ...}`: a required option with the name of the entry stands for the name.
        required = [*(["name"] if name not in schema.get("required", []) else []), *schema.get("required", [])]
        choices.append({**schema, "properties": properties, "required": required})
    return {"anyOf": choices}


def _layer(definitions: JsonSchema) -> JsonSchema:
    """Returns the schema of `kind` or {kind: options}."""
    choices: list[JsonSchema] = [
        {"enum": [name for name, cls in registry.layers.entries.items() if not _required(cls)]}
    ]
    for name, cls in registry.layers.entries.items():
        schema = _schema(cls, definitions)
        forms: list[JsonSchema] = [schema]
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
