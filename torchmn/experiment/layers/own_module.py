"""A module of the user's own, by its name."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from torchmn.errors import nearest
from torchmn.experiment.registry import Layer, register_layer
from torchmn.experiment.weighted import Shape


@register_layer("module")
class OwnModule(Layer):
    """`module: my_package.MyLayer`, or with arguments: `module: {name: my_package.MyLayer, arguments: {width: 3}}`."""

    shorthand: ClassVar[str | None] = "name"

    name: str = Field(description="the module's full name, as my_package.MyLayer")
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


def find_class(name: str) -> Any:
    """What a full name stands for, looked for in the directory we are in and in this Python."""
    package, _, attribute = name.rpartition(".")
    if not package:
        raise ValueError(f"expected a full name, as my_package.{name}, got {name!r}")
    module = import_module(package)
    if not hasattr(module, attribute):
        classes = [n for n, value in vars(module).items() if inspect.isclass(value)]
        raise ValueError(f"{package} has no {attribute!r}" + (f". {nearest(attribute, classes)}" if classes else ""))
    return getattr(module, attribute)


def import_module(name: str) -> Any:
    """The module of this name; a ValueError that says why there is none."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the user's code: it may be a script that ends
        raise ValueError(f"can not import {name} from {os.getcwd()} ({type(error).__name__}: {error})") from error


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
