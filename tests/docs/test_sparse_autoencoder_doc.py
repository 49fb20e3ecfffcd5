"""docs/sparse-autoencoder.md keeps its word: every snippet runs as printed, alone and on two ranks."""

import re
from pathlib import Path

import pytest

from tests.worlds import run_job

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "sparse-autoencoder.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

DRIVER = """
import os, sys
os.chdir(sys.argv[1])
program = {"__name__": "__main__"}
for place, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"snippet {place}", "exec"), program)
print(f"ran {len(SNIPPETS)} snippets")
"""


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_every_snippet_runs_as_printed(n, transport, tmp_path):
    job = run_job(f"SNIPPETS = {SNIPPETS!r}\n{DRIVER}", n, transport, args=[str(tmp_path)], timeout=150)
    assert job.returncode == 0, job.output
    assert job.stdout.count(f"ran {len(SNIPPETS)} snippets") == n
    assert [path.name for path in sorted(tmp_path.glob("pictures/*"))] == ["reconstructions.png", "stimuli.png"]
    first, second, tuned = map(
        float, re.findall(r"stack: ([\d.]+), then ([\d.]+); fine-tuned: ([\d.]+)", job.stdout)[0]
    )
    assert second < first and tuned < 1e3


def test_the_contents_are_the_sections():
    assert re.findall(r"^- \[(.*?)\]\(#", PAGE, re.MULTILINE) == re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    for name in re.findall(r"`(examples/\w+\.py)`|\]\((\w[\w-]*\.md)\)", PAGE):
        assert (ROOT / (name[0] or f"docs/{name[1]}")).exists()
