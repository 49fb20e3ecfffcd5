"""docs/parallel-models.md keeps its word: every snippet runs as printed, alone and on two ranks."""

import re
from pathlib import Path

import pytest

from tests.worlds import run_job

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallel-models.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

DRIVER = """
program = {"__name__": "__main__"}
for place, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"snippet {place}", "exec"), program)
print(f"rank {program['comm'].rank} ran {len(SNIPPETS)} snippets, loss {program['loss'].item():.5f}")
"""


@pytest.fixture(scope="module")
def outputs() -> dict[int, str]:
    results = {
        n: run_job(f"SNIPPETS = {SNIPPETS!r}\n{DRIVER}", n, on, timeout=150) for n, on in ((1, "solo"), (2, "mpi"))
    }
    for result in results.values():
        assert result.returncode == 0, result.output
    return {n: result.stdout for n, result in results.items()}


def test_every_snippet_runs_with_the_same_loss_on_one_rank_and_on_two(outputs):
    one = re.findall(r"rank \d ran \d+ snippets, loss ([\d.]+)", outputs[1])
    two = re.findall(r"rank \d ran \d+ snippets, loss ([\d.]+)", outputs[2])
    assert (len(one), len(two)) == (1, 2)
    assert [float(loss) for loss in two] == pytest.approx([float(one[0])] * 2, rel=1e-3)


def test_what_is_refused_is_named(outputs):
    assert re.search(r"Sorted.*sort along dim 2.*not supported", outputs[2])


def test_it_has_the_snippets_that_its_sections_promise():
    sections = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert re.findall(r"^- \[(.*?)\]\(#", PAGE, re.MULTILINE) == sections
    for section in PAGE.split("\n## ")[1:]:
        assert "```python" in section, section.splitlines()[0]
    for name in re.findall(r"`(examples/\w+\.py)`", PAGE):
        assert (ROOT / name).exists()
