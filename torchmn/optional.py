"""Loads optional packages (fast paths, fusion, guards) by name. The core works without them."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

FUSION = os.environ.get("TORCHMN_FUSION", "1") != "0"
"""Whether `torchmn.sharded.fusion` may be loaded. Ranks compare it when they create a communicator."""


def optional_module(package: str, module: str = "") -> ModuleType | None:
    """Returns an optional package, or a module in it; None if the package is not installed."""
    name = f"{package}.{module}" if module else package
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (package, name):
            raise
        return None
