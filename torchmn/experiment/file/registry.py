"""The words that an experiment file may use, by kind; users add their own with the decorators.

    @torchmn.experiment.register_layer("scale")
    class Scale(torchmn.experiment.Layer):
        factor: float = 2.0                      # `- scale: {factor: 3.0}` in the file, checked before it is used

        def build(self, shape):                  # shape of one sample, without the batch
            return MyScale(self.factor)

A function does too, whose keyword arguments, and all others with a default, are the options:

    @torchmn.experiment.register_layer("scale")
    def scale(shape, factor: float = 2.0):
        return MyScale(factor)

The file then says `imports: [my_package.my_layers]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, PrivateAttr, create_model, model_validator

from torchmn.errors import ArgumentError, nearest


class Options(BaseModel):
    """What a file says about one thing: a layer, a cost, a data set. Unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    kind: ClassVar[str] = ""
    """The name in the file, set by the registry."""
    shorthand: ClassVar[str | None] = None
    """The field that `- kind: value` sets where the value is no mapping."""
    as_function: ClassVar[str] = "build"
    """The method that a function stands for, where a user registers one instead of a class."""
    _where: str = PrivateAttr("")

    @property
    def where(self) -> str:
        """`file:line:column`, for messages."""
        return self._where

    def build(self, *args: Any) -> Any:
        """What these options describe; each kind says what it takes and gives."""
        raise NotImplementedError(f"{type(self).__name__} has no build")

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, given: Any) -> Any:
        """A file has lists only: let them stand for tuples, where options of a user's own are tuples."""
        if not isinstance(given, dict):
            return given
        wanted = {info.alias or name for name, info in cls.model_fields.items() if _is_tuple(info.annotation)}
        return {key: tuple(item) if key in wanted and isinstance(item, list) else item for key, item in given.items()}


def _is_tuple(annotation: Any) -> bool:
    """Whether a type takes tuples and no lists: `tuple[int, int]`, or that or nothing."""
    parts = [annotation, *get_args(annotation)] if get_origin(annotation) in (Union, UnionType) else [annotation]
    kinds = {get_origin(part) or part for part in parts}
    return tuple in kinds and list not in kinds


class Layer(Options):
    """A layer: `build(shape)` gives its module, for samples of that shape (without the batch)."""


Registered = TypeVar("Registered")


class Registry:
    """Names of one kind and what they stand for."""

    def __init__(self, noun: str, plural: str, base: type[Options] = Options):
        self.noun, self.plural, self.base = noun, plural, base
        self.base_of_functions = base  # a kind with options that all of it have (a cost's scale) puts its own here
        self.entries: dict[str, type[Options]] = {}
        self.refused: dict[str, str] = {}  # names that a user may expect, and why they are not supported

    def register(self, *names: str) -> Callable[[Registered], Registered]:
        """A decorator that gives a class of options, or a function, these names; the first is the one shown."""

        def add(given: Registered) -> Registered:
            for name in names:
                if not isinstance(name, str) or not name.isidentifier():
                    raise ArgumentError(f"register_{self.noun}: expected a name such as 'my_{self.noun}', got {name!r}")
                if name in self.entries and not _same_origin(self.entries[name], given):
                    raise ArgumentError(f"register_{self.noun}: there is a {self.noun} {name!r} already")
            is_class = inspect.isclass(given) and issubclass(given, self.base)
            if not is_class and not inspect.isfunction(given):
                raise ArgumentError(
                    f"register_{self.noun}: expected a class derived from torchmn.experiment.{self.base.__name__}, or "
                    f"a function with keyword arguments, got {given!r}"
                )
            options: type[Options] = given if is_class else self._from_function(given)  # type: ignore[assignment, arg-type]
            if "name" in options.model_fields and not issubclass(self.base, Layer):
                raise ArgumentError(
                    f"register_{self.noun}: expected {names[0]} to have no option `name`: in a file that is the key of "
                    f"the word {names[0]!r} itself"
                )
            options.kind = names[0]
            self.entries.update(dict.fromkeys(names, options))
            return given

        if not names:
            raise ArgumentError(f"register_{self.noun}: expected a name")
        return add

    def _from_function(self, function: Callable[..., Any]) -> type[Options]:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        wanted = 0  # of what its kind is given (a layer: the shape), which it may leave out
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY or parameter.default is not parameter.empty:
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[name] = (hints.get(name, Any), default)
            else:
                wanted += 1
        base = self.base_of_functions
        for name, known in base.model_fields.items():
            if known.is_required() and name not in fields:
                raise ArgumentError(f"register_{self.noun}: expected {function.__name__} to take {name}=")

        def build(options: Options, *args: Any) -> Any:
            return function(*args[:wanted], **{name: getattr(options, name) for name in fields})

        made = create_model(function.__name__, __base__=base, __doc__=function.__doc__, **fields)
        setattr(made, base.as_function, build)
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        return made

    def find(self, name: str) -> type[Options]:
        """What `name` stands for; a KeyError with the nearest name if it stands for nothing."""
        if name in self.refused:
            raise KeyError(f"the {self.noun} {name!r} is not supported: {self.refused[name]}")
        if name not in self.entries:
            raise KeyError(f"there is no {self.noun} {name!r}. {nearest(name, self.entries)}")
        return self.entries[name]

    def has(self, name: str) -> bool:
        """Whether a name stands for something, or is refused with a reason."""
        return name in self.entries or name in self.refused

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)


def _same_origin(old: type[Options], new: Any) -> bool:
    """Whether a module that is imported again (a notebook's cell, `python -m`) only says the same again."""
    return old.__qualname__ == new.__qualname__ and old.__module__ == new.__module__


layers = Registry("layer", "layers", Layer)
activations = Registry("activation", "activations")
initializers = Registry("initializer", "initializers")
costs = Registry("cost", "costs")
optimizers = Registry("optimizer", "optimizers")
schedules = Registry("schedule", "schedules")
metrics = Registry("metric", "metrics")
datasets = Registry("dataset", "datasets")

KINDS = (layers, activations, initializers, costs, optimizers, schedules, metrics, datasets)

register_layer = layers.register
register_activation = activations.register
register_initializer = initializers.register
register_cost = costs.register
register_optimizer = optimizers.register
register_metric = metrics.register
register_dataset = datasets.register
