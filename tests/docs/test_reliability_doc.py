"""docs/reliability.md is what tools/reliability.py makes of the measured figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import reliability


@pytest.mark.skipif(not reliability.FIGURES.exists(), reason="no figures have been measured")
def test_the_page_is_generated_from_the_measured_figures() -> None:
    figures = json.loads(reliability.FIGURES.read_text())
    assert reliability.PAGE.read_text() == reliability.page(figures), "run .venv/bin/python tools/reliability.py"


def test_a_recorded_section_replaces_its_last_figures_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reliability, "FIGURES", tmp_path / "figures.json")
    monkeypatch.setattr(reliability, "PAGE", tmp_path / "page.md")
    reliability.record("fuzz", "Files", "All of them.", [], "python tools/fuzz.py")
    for hangs in (7, 1000):
        table = reliability.Table("Hangs of each ending.", ["ending", "hangs"], [["SIGKILL", hangs]])
        reliability.record("faults", "Endings", "Lost ranks.", [table], "python tools/faults.py")
    page = (tmp_path / "page.md").read_text()
    assert "| ending | hangs |\n| --- | ---: |\n| SIGKILL | 1,000 |" in page
    assert page.index("## Endings") < page.index("## Files")
