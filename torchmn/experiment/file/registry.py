"""Registries of the names that an experiment file may use, and the decorators by which users add names.

    @torchmn.experiment.register_layer("scale")
    class Scale(torchmn.experiment.Layer):
        factor: float = 2.0                      # an option: `- scale: {factor: 3.0}` in the file

        def build(self, shape):                  # shape of one sample, without the batch dim
            return MyScale(self.factor)

A function can be registered too; its keyword-only arguments and those with a default are the options:

    @torchmn.experiment.register_layer("scale")
    def scale(shape, factor: float = 2.0):
        return MyScale(factor)

The file lists the module that registers it: `imports: [my_package.my_layers]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, PrivateAttr, create_model, model_validator

from torchmn.errors import ArgumentError, nearest


class Section(BaseModel):
    """Base class of mappings in a file, with a field per key: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Options(Section):
    """Base class of the options of a layer, cost, data set, or other name; the annotated fields are the options.

    Attributes:
        kind: the name in the file, set by the registry.
        shorthand: the field that `- kind: value` sets, if the value is not a mapping; None if there is none.
        function_method: the method that a registered function implements.
    """

    kind: ClassVar[str] = ""
    shorthand: ClassVar[str | None] = None
    function_method: ClassVar[str] = "build"
    _where: str = PrivateAttr("")

    @property
    def where(self) -> str:
        """`file:line:column` of these options, for error messages."""
        return self._where

    def build(self, *args: Any) -> Any:
        """Returns the object that these options describe; arguments and result depend on the kind."""
        raise NotImplementedError(f"{type(self).__name__} has no build")

    @model_validator(mode="before")
    @classmethod
    def _lists_to_tuples(cls, values: object) -> object:
        """Converts lists to tuples for fields annotated as tuples, since YAML has lists only."""
        if not isinstance(values, dict):
            return values
        tuples = {info.alias or name for name, info in cls.model_fields.items() if _is_tuple(info.annotation)}
        return {key: tuple(item) if key in tuples and isinstance(item, list) else item for key, item in values.items()}


def _is_tuple(annotation: object) -> bool:
    """Returns whether a type accepts tuples and not lists, such as `tuple[int, int]` or `tuple[int, int] | None`."""
    parts = [annotation, *get_args(annotation)] if get_origin(annotation) in (Union, UnionType) else [annotation]
    kinds = {get_origin(part) or part for part in parts}
    return tuple in kinds and list not in kinds


class Layer(Options):
    """Base class of layers. Subclasses define `build(shape)`, which returns an `nn.Module`.

    `shape` is the shape of one input sample, without the batch dim.
    """


Registered = TypeVar("Registered")


class Registry:
    """The names of one kind (layers, costs, ...) and their option classes."""

    def __init__(self, noun: str, plural: str, base: type[Options] = Options):
        self.noun, self.plural, self.base = noun, plural, base
        self.function_base = base  # base class for registered functions; has the options common to the kind
        self.entries: dict[str, type[Options]] = {}
        self.unsupported: dict[str, str] = {}  # names that a user may expect, with the reason why they are errors

    def register(self, *names: str) -> Callable[[Registered], Registered]:
        """Returns a decorator that registers a class of options, or a function, under these names.

        A file can then use the names. The arguments of a function that are keyword-only or have a default are its
        options; the others are passed by position, and may be omitted from the end.

        Args:
            names: valid Python identifiers; the first is shown in messages, the others are aliases.

        Returns:
            A decorator that returns its argument unchanged.

        Raises:
            ArgumentError: if a name is not an identifier or is already registered, or if the decorated object is
                neither a function nor a subclass of the base class.
        """

        def add(registered: Registered) -> Registered:
            for name in names:
                if not isinstance(name, str) or not name.isidentifier():
                    raise ArgumentError(f"register_{self.noun}: expected a name such as 'my_{self.noun}', got {name!r}")
                if name in self.entries and not _same_origin(self.entries[name], registered):
                    raise ArgumentError(f"register_{self.noun}: the {self.noun} {name!r} is already registered")
            options = self._options_class(registered)
            if "name" in options.model_fields and not issubclass(self.base, Layer):
                raise ArgumentError(
                    f"register_{self.noun}: expected {names[0]} to have no option `name`: in a file, `name` is the key "
                    f"of {names[0]!r} itself"
                )
            options.kind = names[0]
            self.entries.update(dict.fromkeys(names, options))
            return registered

        if not names:
            raise ArgumentError(f"register_{self.noun}: expected a name")
        return add

    def _options_class(self, registered: object) -> type[Options]:
        if inspect.isclass(registered) and issubclass(registered, self.base):
            return registered
        if inspect.isfunction(registered):
            return self._from_function(registered)
        raise ArgumentError(
            f"register_{self.noun}: expected a class derived from torchmn.experiment.{self.base.__name__}, or "
            f"a function with keyword arguments, got {registered!r}"
        )

    def _from_function(self, function: FunctionType) -> type[Options]:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        positional = 0
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY or parameter.default is not parameter.empty:
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[name] = (hints.get(name, Any), default)
            else:
                positional += 1
        base = self.function_base
        for name, info in base.model_fields.items():
            if info.is_required() and name not in fields:
                raise ArgumentError(f"register_{self.noun}: expected {function.__name__} to take {name}=")

        def build(options: Options, *args: object) -> object:
            return function(*args[:positional], **{name: getattr(options, name) for name in fields})

        made = create_model(function.__name__, __base__=base, __doc__=function.__doc__, **fields)
        setattr(made, base.function_method, build)
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        return made

    def find(self, name: str) -> type[Options]:
        """Returns the option class of `name`.

        Args:
            name: as written in the file.

        Returns:
            The class that was registered under the name.

        Raises:
            KeyError: with the reason if the name is not supported, with the nearest valid name if it is unknown.
        """
        if name in self.unsupported:
            raise KeyError(f"the {self.noun} {name!r} is not supported: {self.unsupported[name]}")
        if name not in self.entries:
            raise KeyError(f"there is no {self.noun} {name!r}. {nearest(name, self.entries)}")
        return self.entries[name]

    def named_by_key(self, value: Iterable[object]) -> str | None:
        """Returns the name among the keys of a mapping that has a required option of that name; None without one."""
        for key in value:
            info = self.entries[key].model_fields.get(key) if isinstance(key, str) and key in self.entries else None
            if info is not None and info.is_required():
                return str(key)
        return None

    def has(self, name: str) -> bool:
        """Returns whether `find` has an entry, or a specific reason for an error, for this name."""
        return name in self.entries or name in self.unsupported

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)


def _same_origin(old: type[Options], new: Any) -> bool:
    """Returns whether both come from the same definition, which was executed twice (a notebook cell, `python -m`)."""
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
