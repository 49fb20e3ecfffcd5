"""Optional packages of the library, taken away: the library must compute the same without them."""

from __future__ import annotations

import importlib.abc
import os
import sys


class TakenAway(importlib.abc.MetaPathFinder):
    """Makes imports of packages fail, as if their files were deleted."""

    def __init__(self, names: list[str]):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self.names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def take_away(*names: str) -> None:
    """Takes packages away from this process, which must not have imported them."""
    sys.meta_path.insert(0, TakenAway([*names]))


# Packages that the tests run without: pytest and the worker processes of its worlds take them away at their start.
WITHOUT = os.environ.get("TESTS_WITHOUT", "").split()
