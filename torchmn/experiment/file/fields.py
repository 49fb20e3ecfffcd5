"""Types of the values in an experiment file: validators with their error texts, and marks for names and sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

from annotated_types import Ge, Gt, Lt
from pydantic import BaseModel, BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from torchmn.experiment.file import registry
from torchmn.experiment.file.registry import Layer, Options, Registry

if TYPE_CHECKING:
    from typing import Annotated as Resolved
else:

    class Resolved:
        """`Resolved[T, marks...]` annotates a field whose value is converted to a T by validators or by `validation`.

        For type checkers it is `Annotated[T, marks...]`. Pydantic sees `Annotated[Any, marks...]`: where a value has an
        error, which is already reported, the field is None.
        """

        def __class_getitem__(cls, arguments: tuple[object, ...]) -> object:
            return Annotated[(Any, *arguments[1:])]


# Not pydantic's Field(ge=1): before 2.12, the default of one field with such a type became the default of all fields
# with that type, and a file without a batch size was accepted.
Count = Annotated[int, Ge(1)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]

SPLITS = ("train", "validation", "test")


def wrong_value(expected: str) -> PydanticCustomError:
    """Returns an error that is reported as "expected <key> to be <expected>, got <value>"."""
    return PydanticCustomError("wrong_value", "{expected}", {"expected": expected})


def invalid(text: str) -> PydanticCustomError:
    """Returns an error that is reported as "<name> <text>", with the name of the section or option."""
    return PydanticCustomError("invalid", "{text}", {"text": text})


def _is_integer(value: object, minimum: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def extent_validator(minimum: int, alternative: str = "") -> Callable[[object], int | tuple[int, ...]]:
    """Returns a validator for an integer, or a list with one per dim; `alternative` is appended to its error text."""

    def check(value: object) -> int | tuple[int, ...]:
        if _is_integer(value, minimum):
            return value
        if isinstance(value, list | tuple) and value and all(_is_integer(item, minimum) for item in value):
            return tuple(value)
        raise wrong_value(f"an integer of at least {minimum}, or a list with one per dim{alternative}")

    return check


def _extent_schema(minimum: int) -> WithJsonSchema:
    integer = {"type": "integer", "minimum": minimum}
    return WithJsonSchema({"anyOf": [integer, {"type": "array", "items": integer, "minItems": 1}]})


Extent = Resolved[int | tuple[int, ...], BeforeValidator(extent_validator(1)), _extent_schema(1)]
"""One number for all dims of an image, or one per dim: 5 or [5, 3]."""
Padding = Resolved[int | tuple[int, ...], BeforeValidator(extent_validator(0)), _extent_schema(0)]


def _sample_fraction(value: object) -> float:
    fraction = None
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            fraction = float(value.strip()[:-1]) / 100
        except ValueError:
            fraction = None
    elif isinstance(value, float):
        fraction = value
    if fraction is None or not 0 < fraction <= 1:
        raise wrong_value("a fraction of the data, such as 10% or 0.1")
    return fraction


SampleFraction = Resolved[
    float,
    BeforeValidator(_sample_fraction),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": "%$"}, {"type": "number", "maximum": 1}]}),
]


def _shape(value: object) -> tuple[int, ...]:
    if _is_integer(value, 1):
        return (value,)
    if not isinstance(value, list | tuple) or not value or not all(_is_integer(item, 1) for item in value):
        raise wrong_value("the shape of a sample, such as [1, 28, 28]")
    return tuple(value)


ShapeField = Resolved[
    tuple[int, ...],
    BeforeValidator(_shape),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1}),
]


def _units(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple) and len(value) == 2 and all(_is_integer(item, 0) for item in value):
        first, last = value
        if first < last:
            return first, last
    raise wrong_value("the first unit and the one after the last, such as [0, 10]")


UnitsField = Resolved[
    tuple[int, int] | None,
    BeforeValidator(_units),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}),
]
"""A range of a model's outputs: the first, and the one after the last."""


class Reference:
    """Marks a field whose value is a name in `registry`, alone or with options: `relu`, or {name: relu, ...}."""

    def __init__(self, registry: Registry):
        self.registry = registry


class ReferenceList(Reference):
    """Marks a field whose value is a list of references."""


class ReferenceOrList(Reference):
    """Marks a field whose value is a reference or a list of references."""


class ReferencesBySplit(ReferenceList):
    """Marks a field whose value is a list of references, or a mapping of splits to such lists."""


class Nested:
    """Marks a field whose value is a mapping with the fields of `cls`, or the value of its shorthand field."""

    def __init__(self, cls: type[BaseModel]):
        self.cls = cls


class ReferenceOrNested(Reference):
    """Marks a field whose value is a reference, or a mapping without `name` that has the fields of `cls`."""

    def __init__(self, registry: Registry, cls: type[BaseModel]):
        super().__init__(registry)
        self.cls = cls


class LayerList:
    """Marks a field whose value is a list of layers."""


DEFINITION = "x-definition"


def named_schema(name: str) -> WithJsonSchema:
    """Returns a JSON schema that `json_schema` replaces by a reference to the definition of this name."""
    return WithJsonSchema({DEFINITION: name})


ActivationField = Resolved[Options | None, Reference(registry.activations), named_schema("activation")]
InitializerField = Resolved[Options | None, Reference(registry.initializers), named_schema("initializer")]
CostField = Resolved[
    Options | list[Options],
    ReferenceOrList(registry.costs),
    WithJsonSchema({"anyOf": [{DEFINITION: "cost"}, {"type": "array", "items": {DEFINITION: "cost"}, "minItems": 1}]}),
]
_METRICS = {"type": "array", "items": {DEFINITION: "metric"}}
MetricsField = Resolved[
    list[Options] | dict[str, list[Options]],
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
LAYERS_SCHEMA = WithJsonSchema({"type": "array", "items": {DEFINITION: "layer"}, "minItems": 1})
LayersField = Resolved[list[Layer], LayerList(), LAYERS_SCHEMA]
