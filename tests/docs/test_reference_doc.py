"""docs/reference.md and docs/glossary.md: programs run as printed, and tables list what exists."""

from __future__ import annotations

import re

import pytest

from tests.cli.commands import COMMANDS
from tests.docs.pages import (
    ROOT,
    assert_contents_are_the_sections,
    assert_public_names_and_links_exist,
    page,
    run_snippets,
)

PAGE = page("reference.md")
SET_BY_TORCHMN = {"TORCHMN_RUN", "TORCHMN_RUN_REPORTS_EXITS", "TORCHMN_STORE", "TORCHMN_TESTING_RANK"}  # for its ranks


def test_every_program_runs_as_printed(tmp_path) -> None:
    run_snippets(PAGE, 1, "solo", tmp_path)


def test_the_table_of_variables_is_complete() -> None:
    source = "".join(path.read_text() for path in (ROOT / "torchmn").rglob("*.py"))
    variables = set(re.findall(r"\bTORCHMN_[A-Z_]+\b", source))
    assert set(re.findall(r"^\| `(TORCHMN_\w+)`", PAGE, re.MULTILINE)) == variables - SET_BY_TORCHMN


def test_the_table_of_commands_is_complete() -> None:
    section = PAGE.partition("\n## Commands\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `torchmn (\w+)", section, re.MULTILINE) == list(COMMANDS)


@pytest.mark.parametrize("name", ["reference.md", "glossary.md"])
def test_names_and_links_exist(name: str) -> None:
    assert_public_names_and_links_exist(page(name))


def test_contents_are_the_sections() -> None:
    assert_contents_are_the_sections(PAGE)
