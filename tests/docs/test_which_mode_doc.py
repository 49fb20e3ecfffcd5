"""docs/which-mode.md: its shares of weights and activations are those that are measured."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import page
from tools.mode_shares import MODES, row

TABLE = page("which-mode.md").partition("<!-- shares:")[2].partition("\n\n")[0]


@pytest.mark.parametrize("mode", MODES)
def test_the_shares_of_a_mode_are_those_of_the_table(mode: str) -> None:
    shown = re.search(rf"^\| `{mode}` .*$", TABLE, re.MULTILINE)
    assert shown is not None
    assert shown[0] == row(mode)
