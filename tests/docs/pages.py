"""Pages of the documentation as programs: their snippets, run as printed, and their table of contents."""

from __future__ import annotations

import re
from pathlib import Path

import torchmn
from tests._worlds import JobResult, run_job

ROOT = Path(__file__).parents[2]

_DRIVER = """
import os, sys
os.chdir(sys.argv[1])
program = {"__name__": "__main__"}
for place, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"snippet {place}", "exec"), program)
print(f"ran {len(SNIPPETS)} snippets")
"""


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def snippets(text: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_snippets(text: str, n: int, transport: str, directory: Path, after: str = "") -> JobResult:
    """The good result of running all snippets of a page in one program, and `after` them."""
    blocks = snippets(text)
    script = f"SNIPPETS = {blocks!r}\n{_DRIVER}\n{after}"
    job = run_job(script, n, transport, args=[str(directory)], timeout=150)
    assert job.returncode == 0, job.output
    assert job.stdout.count(f"ran {len(blocks)} snippets") == n
    return job


def assert_contents_are_the_sections(text: str) -> None:
    assert re.findall(r"^- \[(.*?)\]\(#", text, re.MULTILINE) == re.findall(r"^## (.*)$", text, re.MULTILINE)


def assert_every_section_has_a_snippet(text: str) -> None:
    for section in text.split("\n## ")[1:]:
        assert "```python" in section, section.splitlines()[0]
    for name in re.findall(r"`(examples/[\w/]+\.py)`", text):
        assert (ROOT / name).exists()


def assert_public_names_and_links_exist(text: str) -> None:
    """All names of ours that a page has in its text, and the pages and examples that it points to."""
    names = re.findall(r"`(torchmn\.[\w.]+)", text)
    assert names
    for name in names:
        found = torchmn
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)
    for example, other in re.findall(r"`(examples/[\w/]+\.py)`|\]\((\w[\w-]*\.md)\)", text):
        assert (ROOT / (example or f"docs/{other}")).exists()
