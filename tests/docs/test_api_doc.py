"""docs/api.md lists every public name, and no other."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import page
from tools.public_names import public_names, public_packages

SECTIONS = dict(re.findall(r"^## (torchmn[\w.]*)\n(.*?)(?=^## |\Z)", page("api.md"), re.MULTILINE | re.DOTALL))
REMEDY = "run .venv/bin/python tools/public_names.py, which writes the lists"


def test_it_has_a_section_for_every_public_package() -> None:
    assert list(SECTIONS) == public_packages(), REMEDY


@pytest.mark.parametrize("package", SECTIONS)
def test_a_section_lists_the_public_names_of_its_package(package: str) -> None:
    assert re.findall(r"^   (\w+)$", SECTIONS[package], re.MULTILINE) == public_names(package), REMEDY
