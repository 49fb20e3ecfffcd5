"""Test modules in worker processes, with asserts as readable as in pytest itself."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts


class AssertionRewriter(importlib.machinery.SourceFileLoader):
    """Loads a module whose failing asserts show the values they compared."""

    def get_code(self, fullname: str) -> CodeType:
        # From the source every time: the byte code that Python caches beside it holds the plain asserts.
        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)


def load_test_module(name: str, path: str) -> ModuleType:
    """The module at `path`, under the name that pytest gives it so that pickles of its classes travel."""
    module = sys.modules.get(name)
    if module is None or getattr(module, "__file__", None) != path:
        spec = importlib.util.spec_from_loader(name, AssertionRewriter(name, path), origin=path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def find_test(module: ModuleType, qualified_name: str) -> Callable[..., None]:
    """The test function or the bound method of a fresh instance of its test class."""
    found: Any = module
    for part in qualified_name.split("."):
        found = getattr(found, part)
        if isinstance(found, type):
            found = found()
    return found
