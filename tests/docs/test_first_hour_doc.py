"""docs/first-hour.md: its files and commands, in the order of the page."""

from __future__ import annotations

import re
import subprocess

from tests.docs.pages import assert_contents_are_the_sections, page
from tools.page_blocks import commands_of, environment, files_of

PAGE = page("first-hour.md")


def test_every_command_runs_with_the_files_of_the_page(tmp_path):
    for name, text in files_of(PAGE).items():
        (tmp_path / name).write_text(text)
    shown = {}
    for command in commands_of(PAGE):
        run = subprocess.run(
            command.split(), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
        )
        assert run.returncode == 0, f"{command}\n{run.stdout}{run.stderr}"
        shown[command] = run.stdout
    assert list(shown) == [
        "python train.py",
        "torchmn run -n 2 train.py",
        "torchmn train digits.yaml -n 2 --halopar --out run",
        "torchmn evaluate run",
    ]
    for size, output in enumerate(list(shown.values())[:2], start=1):
        losses = re.findall(rf"rank \d of {size}: last loss ([\d.]+)", output)
        assert len(losses) == size
        assert all(float(loss) < 1 for loss in losses)
    accuracy = re.findall(r"([\d.]+)%", shown["torchmn train digits.yaml -n 2 --halopar --out run"])
    assert float(accuracy[-1]) > 70
    assert accuracy[-1] in shown["torchmn evaluate run"]
    assert (tmp_path / "run" / "report.html").exists()


def test_contents_are_the_sections():
    assert_contents_are_the_sections(PAGE)
