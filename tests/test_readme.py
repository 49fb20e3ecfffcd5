"""README.md: its program runs as printed, and what it names exists."""

import re
from pathlib import Path

import pytest

from tests._worlds import run_job

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_the_program_runs_as_printed_and_learns(n, transport):
    result = run_job(PROGRAM, n, transport, timeout=100)
    accuracy = re.fullmatch(rf"([\d.]+)% on {n} rank\(s\)", result.stdout.strip())
    assert accuracy is not None, result.output
    assert float(accuracy[1]) > 80


def test_every_file_and_folder_that_it_names_exists():
    named = re.findall(r"\]\(([^):#]+)\)|`((?:torchmn|tests|examples|docs)/[\w./]+)`", README)
    paths = {link or path for link, path in named}
    assert len(paths) > 6
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_on_pypi_its_links_are_absolute():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read pyproject.toml")
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"][
        "fancy-pypi-readme"
    ]
    text = README
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == []
    assert "](https://github.com/torchmn/torchmn/blob/main/docs/experiments.md)" in text
    assert "](https://raw.githubusercontent.com/torchmn/torchmn/main/docs/pictures/tiles.png)" in text


def test_it_leads_to_every_page_of_the_documentation():
    assert [page.name for page in ROOT.glob("docs/*.md") if f"](docs/{page.name})" not in README] == []


def test_every_make_target_that_it_names_exists():
    targets = set(re.findall(r"^make (\w+)", README, re.MULTILINE))
    assert targets >= {"demo", "test"}
    defined = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets <= defined
