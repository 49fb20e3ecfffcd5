"""Test modules in worker processes, with asserts as readable as in pytest itself."""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.util
import marshal
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any

import pytest
from _pytest.assertion.rewrite import rewrite_asserts

# Beside Python's own byte code, which holds the plain asserts; as Python's, it is kept where that is allowed.
CACHE = f"pytest{pytest.__version__.replace('.', '')}"


class AssertionRewriter(importlib.machinery.SourceFileLoader):
    """Loads a module whose failing asserts show the values they compared."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        key = importlib.util.source_hash(source)
        cache = importlib.util.cache_from_source(path, optimization=CACHE)
        with contextlib.suppress(OSError, EOFError, ValueError):
            kept = self.get_data(cache)
            if kept.startswith(key):
                return marshal.loads(kept[len(key) :])
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        code = compile(tree, path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            self.set_data(cache, key + marshal.dumps(code))
        return code


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
