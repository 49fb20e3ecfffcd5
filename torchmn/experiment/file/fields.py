"""The types of values in an experiment file, each with the words for what it expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from annotated_types import Ge, Gt, Lt
from pydantic import BaseModel, BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from torchmn.experiment.file import registry
from torchmn.experiment.file.registry import Registry

# Not pydantic's Field(ge=1): before 2.12 the default of one option with such a type became that of all others with it,
# and a file without a batch size was read as if it had one.
Count = Annotated[int, Ge(1)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Lt(1)]

SPLITS = ("train", "validation", "test")


def refuse(what: str) -> PydanticCustomError:
    """An error that says: expected ... to be `what`, got ..."""
    return PydanticCustomError("expected", "{what}", {"what": what})


def problem(text: str) -> PydanticCustomError:
    """An error that says `text`, after the name of what it is about."""
    return PydanticCustomError("problem", "{text}", {"text": text})


def _whole(value: Any, smallest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= smallest


def extent(smallest: int, more: str = "") -> Callable[[Any], Any]:
    """A check that a value is a whole number, or a list with one for each dim; `more` ends the message."""

    def check(value: Any) -> Any:
        if _whole(value, smallest):
            return value
        if isinstance(value, list | tuple) and value and all(_whole(item, smallest) for item in value):
            return tuple(value)
        words = f"a whole number of at least {smallest}, or a list with one for each dim {more}"
        raise refuse(words.strip())

    return check


def _extent_schema(smallest: int) -> WithJsonSchema:
    one = {"type": "integer", "minimum": smallest}
    return WithJsonSchema({"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]})


Extent = Annotated[Any, BeforeValidator(extent(1)), _extent_schema(1)]
"""One number for all dims of an image, or one for each: 5 or [5, 3]."""
Padding = Annotated[Any, BeforeValidator(extent(0)), _extent_schema(0)]


def _sample(value: Any) -> float:
    share = None
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            share = float(value.strip()[:-1]) / 100
        except ValueError:
            share = None
    elif isinstance(value, float):
        share = value
    if share is None or not 0 < share <= 1:
        raise refuse("a share of the data, as 10% or 0.1")
    return share


Sample = Annotated[
    Any,
    BeforeValidator(_sample),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": "%$"}, {"type": "number", "maximum": 1}]}),
]


def _shape(value: Any) -> tuple[int, ...]:
    if _whole(value, 1):
        return (value,)
    if not isinstance(value, list | tuple) or not value or not all(_whole(item, 1) for item in value):
        raise refuse("the shape of a sample, as [1, 28, 28]")
    return tuple(value)


ShapeField = Annotated[
    Any,
    BeforeValidator(_shape),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}),
]


def _units(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(_whole(item, 0) for item in value):
        first, last = value
        if first < last:
            return first, last
    raise refuse("a first unit and the one after the last, as [0, 10]")


UnitsField = Annotated[
    Any,
    BeforeValidator(_units),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}),
]
"""Some of a model's outputs: the first, and the one after the last."""


class Reference:
    """Marks a field whose value is a name of `registry` with its options: `relu`, or {name: relu, ...}."""

    def __init__(self, registry: Registry):
        self.registry = registry


class ReferenceList(Reference):
    """Marks a field whose value is a list of such names."""


class ReferenceOrList(Reference):
    """Marks a field whose value is such a name, or a list of them."""


class ReferencesBySplit(ReferenceList):
    """Marks a field whose value is a list of such names, or a mapping of splits to lists."""


class Nested:
    """Marks a field whose value is a mapping with options of `cls`, or (with its shorthand) a plain value."""

    def __init__(self, cls: type[BaseModel]):
        self.cls = cls


class ReferenceOrNested(Reference):
    """Marks a field whose value is such a name with its options, or a mapping without a name: options of `cls`."""

    def __init__(self, registry: Registry, cls: type[BaseModel]):
        super().__init__(registry)
        self.cls = cls


class LayerList:
    """Marks a field whose value is a list of layers."""


DEFINITION = "x-definition"


def named_schema(name: str) -> WithJsonSchema:
    """In the JSON schema: what stands under this name among its definitions; `json_schema` makes a reference of it."""
    return WithJsonSchema({DEFINITION: name})


ActivationField = Annotated[Any, Reference(registry.activations), named_schema("activation")]
InitializerField = Annotated[Any, Reference(registry.initializers), named_schema("initializer")]
CostField = Annotated[
    Any,
    ReferenceOrList(registry.costs),
    WithJsonSchema({"anyOf": [{DEFINITION: "cost"}, {"type": "array", "items": {DEFINITION: "cost"}, "minItems": 1}]}),
]
OptimizerField = Annotated[Any, Reference(registry.optimizers), named_schema("optimizer")]
DatasetField = Annotated[Any, Reference(registry.datasets), named_schema("dataset")]
_METRICS = {"type": "array", "items": {DEFINITION: "metric"}}
MetricsField = Annotated[
    Any,
    ReferencesBySplit(registry.metrics),
    WithJsonSchema(
        {
            "anyOf": [
                _METRICS,
                {"type": "object", "properties": dict.fromkeys(SPLITS, _METRICS), "additionalProperties": False},
            ]
        }
    ),
]
LayersField = Annotated[
    Any, LayerList(), WithJsonSchema({"type": "array", "items": {DEFINITION: "layer"}, "minItems": 1})
]
