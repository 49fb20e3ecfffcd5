"""Imports users' code by name, for `module:` and `imports:`; this runs the code."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from types import ModuleType
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from torchmn.errors import nearest
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape


@register_layer("module")
class UserModule(Layer):
    """`module: my_package.MyLayer`, or with arguments: `module: {name: my_package.MyLayer, arguments: {width: 3}}`.

    It imports my_package, which runs its code, and calls MyLayer, which must be a subclass of torch.nn.Module.
    """

    shorthand: ClassVar[str | None] = "name"

    name: str = Field(description="the full name of the class, such as my_package.MyLayer")
    arguments: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the class")

    def build(self, shape: Shape) -> nn.Module:
        cls = find_class(self.name)
        try:
            module = cls(**self.arguments)
        except Exception as error:  # the code of users may raise anything
            raise ValueError(
                f"{self.name}({_arguments(self.arguments)}) raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"expected {self.name} to return a torch.nn.Module, got {type(module).__name__}")
        return module


def find_class(name: str) -> type[nn.Module]:
    """Returns the subclass of nn.Module with this full name; raises a ValueError for anything else.

    Other classes and functions are never called: subprocess.Popen, for example, would start a program.
    """
    package, _, attribute = name.rpartition(".")
    if not package:
        raise ValueError(f"expected a full name, such as my_package.{name}, got {name!r}")
    module = import_module(package)
    if not hasattr(module, attribute):
        classes = [n for n, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(f"{package} has no {attribute!r}" + (f". {nearest(attribute, classes)}" if classes else ""))
    found = getattr(module, attribute)
    if not inspect.isclass(found) or not issubclass(found, nn.Module):
        what = "another class" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise ValueError(
            f"expected {name} to be a subclass of torch.nn.Module, got {what}. Functions can be layers: use "
            "@torchmn.experiment.register_layer and `imports:`"
        )
    return found


def import_module(name: str) -> ModuleType:
    """Imports a module from Python's path, then from the current directory.

    The current directory is last, so that a file in it does not replace a standard or installed module.

    Raises:
        ValueError: if the import fails, or if the current directory has a module of this name that was not imported.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the code of users may raise anything, or call sys.exit
        raise ValueError(f"cannot import {name} from {here} ({type(error).__name__}: {error})") from error
    _check_not_shadowed(name.partition(".")[0])
    return found


def _check_not_shadowed(package: str) -> None:
    """Raises a ValueError if another module was imported than the one of this name in the current directory."""
    imported = getattr(importlib.import_module(package), "__file__", None) or "Python itself"
    for local in (os.path.join(os.getcwd(), f"{package}.py"), os.path.join(os.getcwd(), package, "__init__.py")):
        if os.path.exists(local) and not (os.path.exists(imported) and os.path.samefile(local, imported)):
            raise ValueError(f"{local} is shadowed by the module {package} of {imported}: rename your file")


def _arguments(arguments: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
