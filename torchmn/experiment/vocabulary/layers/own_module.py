"""A module of the user's own, by its name: `module:` and `imports:` run the Python code that they name."""

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
class OwnModule(Layer):
    """`module: my_package.MyLayer`, or with arguments: `module: {name: my_package.MyLayer, arguments: {width: 3}}`.

    This imports my_package, which runs its code, and calls MyLayer, which must be a subclass of torch.nn.Module.
    """

    shorthand: ClassVar[str | None] = "name"

    name: str = Field(description="the full name of its class, as my_package.MyLayer")
    arguments: dict[str, Any] = Field(default_factory=dict, description="what its class is called with")

    def build(self, shape: Shape) -> nn.Module:
        made = find_class(self.name)
        try:
            module = made(**self.arguments)
        except Exception as error:  # the user's own code may raise anything
            raise ValueError(
                f"{self.name}({_arguments(self.arguments)}) raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(module, nn.Module):
            raise ValueError(f"{self.name} makes {type(module).__name__}, and no torch.nn.Module")
        return module


def find_class(name: str) -> type[nn.Module]:
    """The class of modules that a full name stands for; a ValueError if that is anything else.

    Nothing but such a class is called: a name such as subprocess.Popen would start a program.
    """
    package, _, attribute = name.rpartition(".")
    if not package:
        raise ValueError(f"expected a full name, as my_package.{name}, got {name!r}")
    module = import_module(package)
    if not hasattr(module, attribute):
        classes = [n for n, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(f"{package} has no {attribute!r}" + (f". {nearest(attribute, classes)}" if classes else ""))
    found = getattr(module, attribute)
    if not inspect.isclass(found) or not issubclass(found, nn.Module):
        what = "another class" if inspect.isclass(found) else f"a {type(found).__name__}"
        raise ValueError(
            f"expected {name} to be a subclass of torch.nn.Module, got {what}, which is not called. What a function "
            "makes can be a layer by @torchmn.experiment.register_layer and `imports:`"
        )
    return found


def import_module(name: str) -> ModuleType:
    """Imports the module of this name, from Python's path and then from the directory we are in.

    That directory comes last, so that a file in it does not replace a module of Python or of an installed package.

    Raises:
        ValueError: with the reason, if there is none, it fails, or a file of this name here is hidden by another.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code: it may be a script that ends
        raise ValueError(f"can not import {name} from {here} ({type(error).__name__}: {error})") from error
    _check_not_hidden(name.partition(".")[0])
    return found


def _check_not_hidden(package: str) -> None:
    """A ValueError if a module of another place was imported, although the user has one of this name here."""
    taken = getattr(sys.modules.get(package), "__file__", None) or "Python itself"
    for mine in (os.path.join(os.getcwd(), f"{package}.py"), os.path.join(os.getcwd(), package, "__init__.py")):
        if os.path.exists(mine) and not (os.path.exists(taken) and os.path.samefile(mine, taken)):
            raise ValueError(f"{mine} is hidden by the {package} of {taken}, which is another: give yours another name")


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
