"""Sphinx configuration of the documentation site, which `make docs` writes to build/docs.

The source directory is the repository and not docs/, so that a link between pages is the same here and on GitHub.
"""

from __future__ import annotations

import re
from typing import Any

import torchmn

project = "TorchMN"
version = release = torchmn.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

root_doc = "docs/index"
include_patterns = [
    *("*.md", "docs/**.md", "docs/api/**", "benchmarks/RESULTS.md", "tests/README.md"),
    "torchmn/datasets/mnist_sample/ATTRIBUTION.md",
]
exclude_patterns = [".*", "build", "docs/_*"]
myst_heading_anchors = 4  # as GitHub has them

# The lists of docs/api.md become one page per name.
autosummary_generate = True
autosummary_imported_members = True
autosummary_context = {"top_level": torchmn.__all__}
templates_path = ["docs/_templates"]
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are listed, and are no objects: fields of named tuples would be documented twice
suppress_warnings = ["ref.python"]  # classes with two public names, as torchmn.ExperimentError

html_theme = "furo"
html_title = f"TorchMN {version}"
html_extra_path = ["_static/index.html"]  # the start of the site leads to docs/index.html
html_copy_source = False
copybutton_prompt_text = "$ "

_CODE = re.compile(r"`([^`]+)`")


def _as_restructured_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Converts a docstring, which has Markdown's code spans and literal asterisks, in place."""
    if what == "data":  # autodoc would show the docstring of its class
        lines[:] = [f"A ``{type(obj).__name__}``."]
        return
    in_code = False
    for number, line in enumerate(lines):
        if in_code and (not line or line.startswith(" ")):
            continue
        in_code = line.endswith("::")
        texts = _CODE.split(line)
        texts[::2] = [text.replace("*", "\\*") for text in texts[::2]]
        texts[1::2] = [rf"``{code}``\ " for code in texts[1::2]]
        lines[number] = "".join(texts)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)  # before napoleon
