"""docs/architecture.md: every path that it names exists, and its test passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import snippets

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATHS = sorted(set(re.findall(r"`([a-z_]+/[a-z_./]*|[a-z_]+\.py)`", PAGE)))


def test_the_page_names_paths():
    assert len(PATHS) > 40


@pytest.mark.parametrize("path", PATHS)
def test_a_path_on_the_page_exists(path: str):
    """Short paths, such as `rules/` in the row of `sharded/`, are found anywhere in the package."""
    assert (ROOT / path).exists() or list((ROOT / "torchmn").rglob(path.rstrip("/")))


def test_the_test_of_a_layer_passes():
    program: dict[str, Any] = {}
    exec(snippets(PAGE)[-1], program)
    for mode in ("datapar", "halopar"):
        program["test_the_layer_has_the_losses_of_one_rank"](mode)
