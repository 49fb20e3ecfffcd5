"""Brings the lists of docs/api.md up to date: .venv/bin/python tools/public_names.py

A new package gets a section, whose sentence someone writes. With `--files` it prints the files that define public
names, whose docstrings `make check` checks.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torchmn

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
_OPTIONAL = {"torchmn.sharded.fusion", "torchmn.chainermn", "torchmn.neon"}  # loaded by name; may be absent
_INNER = {"torchmn.experiment.neon.layers"}  # of the package above it
_SECTION = """## {package}

{sentence}

```{{eval-rst}}
.. currentmodule:: {package}

.. autosummary::
   :toctree: api
   :nosignatures:

{names}
```
"""


def public_packages() -> list[str]:
    """Returns the packages that have public names: those with `__all__`."""
    found = pkgutil.walk_packages(torchmn.__path__, "torchmn.")
    packages = [each.name for each in found if each.ispkg and each.name not in _OPTIONAL | _INNER]
    return sorted(["torchmn", *(name for name in packages if "__all__" in vars(import_module(name)))])


def public_names(package: str) -> list[str]:
    """Returns the public names of a package without its subpackages, which have separate sections."""
    module = import_module(package)
    return [
        name for name in module.__all__ if name != "__version__" and not isinstance(getattr(module, name), ModuleType)
    ]


def up_to_date(page: str) -> str:
    """Returns the page with a section for each public package, and all names in it."""
    head, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    sentences = {}
    for section in sections:
        title, sentence = section.split("\n")[0:3:2]
        sentences[title.removeprefix("## ")] = sentence
    made = [
        _SECTION.format(
            package=package,
            sentence=sentences.get(package, (import_module(package).__doc__ or "").strip().split("\n")[0]),
            names="\n".join(f"   {name}" for name in public_names(package)),
        )
        for package in public_packages()
    ]
    return head + "\n".join(made)


def public_files() -> list[str]:
    """Returns the files that define public functions and classes, relative to the repository."""
    files = set()
    for package in public_packages():
        for name in public_names(package):
            defined = inspect.unwrap(getattr(import_module(package), name))
            if inspect.isclass(defined) or inspect.isfunction(defined):
                files.add(Path(inspect.getfile(defined)).relative_to(PAGE.parents[1]))
    return sorted(map(str, files))


if __name__ == "__main__":
    if "--files" in sys.argv:
        print(*public_files())
        sys.exit()
    PAGE.write_text(up_to_date(PAGE.read_text()))
