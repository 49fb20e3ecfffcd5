"""docs/architecture.md: every path that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PATHS = sorted(set(re.findall(r"`([a-z_]+/[a-z_./]*|[a-z_]+\.py)`", PAGE)))


def test_the_page_names_paths():
    assert len(PATHS) > 40


@pytest.mark.parametrize("path", PATHS)
def test_a_path_on_the_page_exists(path: str):
    """Short paths, such as `rules/` in the row of `sharded/`, are found anywhere in the package."""
    assert (ROOT / path).exists() or list((ROOT / "torchmn").rglob(path.rstrip("/")))
