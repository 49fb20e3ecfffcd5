"""docs/from-neon.md keeps its word: every snippet runs as printed, alone and on two ranks."""

import re
from pathlib import Path

import pytest

import torchmn
from tests.worlds import run_job

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-neon.md").read_text()
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
    assert job.stdout.count("torch.Size([2, 7])") == n


def test_every_public_name_on_the_page_exists():
    for name in re.findall(r"`(torchmn\.[\w.]+)", PAGE):
        found = torchmn
        for part in name.split(".")[1:]:
            found = getattr(found, part)


def test_the_contents_are_the_sections():
    assert re.findall(r"^- \[(.*?)\]\(#", PAGE, re.MULTILINE) == re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    for name in re.findall(r"`(examples/\w+\.py)`|\]\((\w[\w-]*\.md)\)", PAGE):
        assert (ROOT / (name[0] or f"docs/{name[1]}")).exists()
