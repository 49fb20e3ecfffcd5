"""Calls, attributes and arguments as other libraries spell them.

The core calls these functions where it would raise an error: for an unknown attribute, arguments that do not fit a
signature, an object that is not a tensor, or not a communicator. For correct programs they are never called. The tables
are filled by optional packages (`PACKAGES`), which are loaded by name when the first such error occurs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torchmn.errors import ArgumentError
from torchmn.optional import optional_module

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

PACKAGES = ("torchmn.chainermn", "torchmn.neon")


class OtherName(NamedTuple):
    """A public name of another library, and what it is here.

    Attributes:
        name: in that library, such as `links.create_mnbn_model`, or `CommunicatorBase.split` of a method.
        here: the same under `torchmn`: a module and a name in it, or a class and its attribute; "" if there is none.
        note: what to use instead, or what differs; part of the error if `here` is "".
    """

    name: str
    here: str = ""
    note: str = ""


class Respelled(NamedTuple):
    """A call in this library's spelling.

    Attributes:
        args, kwargs: for the function.
        finish: converts the function's result.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any] | None = None


class ForeignMessage(ArgumentError):
    """An argument that is a message of another kind than a tensor, such as an array. Nothing was sent yet."""


calls: dict[str, Callable[..., Respelled | None]] = {}
"""By qualified name of a function, or a method with its class: respells `(args, kwargs)` that do not fit it."""

foreign_messages: dict[str, Callable[..., Respelled | None]] = {}
"""By qualified name of an operation: respells `(args, kwargs)` in which a `ForeignMessage` was found."""

message_types: list[type] = []
"""Types of objects that `foreign_messages` converts to tensors."""

adapters: list[Callable[[object], Any]] = []
"""Each returns a communicator for an object of another library, or None."""

communicator_attributes: dict[str, Callable[[Any], Any]] = {}
"""By name: returns the value of an attribute of a communicator, or raises an AttributeError."""

module_names: dict[str, Callable[[], Any]] = {}
"""By name, such as `datasets.scatter_dataset`: returns what `torchmn.<name>` is."""

advice: dict[str, str] = {}
"""By name, or by class and name with a dot between them: what to use instead of a name that does not exist here."""


@functools.cache
def _load() -> tuple[ModuleType | None, ...]:
    """Loads the packages that fill the tables."""
    return tuple(optional_module(package) for package in PACKAGES)


def communicator_attribute(comm: Any, name: str) -> Any:
    """Returns the value of an attribute that class Communicator does not have, or raises an AttributeError."""
    if not name.startswith("__"):  # Python and its tools look up such names often
        _load()
    if name in communicator_attributes:
        return communicator_attributes[name](comm)
    hint = f"; instead: {advice[f'Communicator.{name}']}" if f"Communicator.{name}" in advice else ""
    # From the name and the object, Python suggests the nearest name.
    raise AttributeError(f"'Communicator' object has no attribute {name!r}{hint}", name=name, obj=comm)


def module_name(name: str) -> Callable[[], Any] | None:
    """Returns a function that returns what `torchmn.<name>` is; None if no other library has that name."""
    _load()
    return module_names.get(name)


def module_attribute(module: str, name: str, names: tuple[str, ...]) -> Any:
    """Returns a name that module `torchmn.<module>` does not have, or raises an AttributeError.

    Args:
        module: a subpackage.
        name: the name.
        names: those of other libraries; for all others, no package is loaded.
    """
    instead = None
    if name in names:
        value_of = module_name(f"{module}.{name}")
        if value_of is not None:
            return value_of()
        instead = advice_for(f"{module}.{name}")
    hint = f"; instead: {instead}" if instead else ""
    raise AttributeError(f"module 'torchmn.{module}' has no attribute {name!r}{hint}", name=name)


def advice_for(name: str) -> str | None:
    """Returns what to use instead of a name of another library, or None."""
    _load()
    return advice.get(name)


def adapted(given: object) -> Any:
    """Returns the communicator for another library's communicator, or None."""
    _load()
    return next((found for adapt in adapters if (found := adapt(given)) is not None), None)


def check_foreign_message(x: object) -> None:
    """Raises a ForeignMessage if `x` is a message of another kind than a tensor."""
    _load()
    if isinstance(x, tuple(message_types)):
        raise ForeignMessage(f"expected a tensor, got an object of type {type(x).__name__}")


def respelled(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> Respelled | None:
    """Returns the call `function(*args, **kwargs)`, which raised `error`, in this library's spelling, or None.

    Only for a TypeError of the call itself (arguments that do not fit the signature), and for a ForeignMessage.
    """
    if isinstance(error, ForeignMessage):
        respell = foreign_messages.get(function.__qualname__)
        return None if respell is None else respell(args, kwargs)
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised inside of the function
        return None
    return respelled_call(function.__qualname__, args, kwargs)


def respelled_call(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Respelled | None:
    """Returns the call of a function, by qualified name, in this library's spelling, or None."""
    _load()
    respell = calls.get(function)
    return None if respell is None else respell(args, kwargs)


def other_spellings(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Returns `function` such that it may also be called as other libraries spell it."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            other = respelled(function, args, kwargs, error)
            if other is None:
                raise
        return run(*other.args, **other.kwargs)

    return run
