"""docs/data-parallel.md keeps its word: every snippet runs as printed, alone and on two ranks."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests._worlds import run_job
from tests.docs.pages import assert_contents_are_the_sections, assert_every_section_has_a_snippet
from tools.page_blocks import commands_of, environment, files_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "data-parallel.md").read_text()
_, STEP_2, *SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

# The snippets go on from the program of step 2, each for itself: in one job, because a start costs more than they do.
DRIVER = """
import os, sys
os.chdir(sys.argv[1])
program = {"__name__": "__main__"}
exec(compile(STEP_2, "step 2", "exec"), program)
for place, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"snippet {place}", "exec"), dict(program))
    if program["comm"].rank == 0:
        sys.stdout.write(f"ran {place}\\n")  # at once: other ranks print, too
"""

WORLDS = [(1, "solo"), (2, "mpi")]


# There is one host, and two ranks take half the time of four.
COMMANDS = [command.replace(" 4 ", " 2 ") for command in commands_of(PAGE) if "-hosts" not in command]


@pytest.mark.parametrize("command", COMMANDS)
def test_step_1_runs_with_every_launcher_and_learns(command, tmp_path):
    (tmp_path / "train.py").write_text(files_of(PAGE)["train.py"])
    size = int((re.search(r" (\d) ", command) or ["", "1"])[1])
    run = subprocess.run(
        command.split(), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=150, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    losses = re.findall(r"epoch 2: loss ([\d.]+)", run.stdout)
    assert len(losses) == size  # every rank prints, as the page states
    assert all(float(loss) < 1.2 for loss in losses)  # from 2.3; of one batch, and not seeded


@pytest.mark.parametrize(("n", "transport"), WORLDS)
def test_step_2_runs_as_printed_and_every_later_snippet_goes_on_from_it(n, transport, tmp_path):
    texts = f"STEP_2 = {STEP_2!r}\nSNIPPETS = {SNIPPETS!r}\n"
    result = run_job(texts + DRIVER, n, transport, args=[str(tmp_path)], timeout=100)
    assert result.returncode == 0, result.output
    assert re.findall(r"ran (\d+)", result.stdout) == [str(place) for place in range(len(SNIPPETS))], result.output
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[-1]["step"] == 2 * 6000 // 100 // n  # an epoch is an epoch
    assert rows[-1]["accuracy"] > 0.8
    assert len(re.findall(r"epoch +loss +accuracy", result.stdout)) == 1  # output once


def test_it_has_the_snippets_that_its_sections_promise():
    assert_contents_are_the_sections(PAGE)
    assert_every_section_has_a_snippet(PAGE)
