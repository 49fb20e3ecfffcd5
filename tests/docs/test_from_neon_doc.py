"""docs/from-neon.md keeps its word: every snippet runs as printed, alone and on two ranks."""

import re

import pytest

import torchmn
from tests.docs.pages import ROOT, assert_contents_are_the_sections, page, run_snippets

PAGE = page("from-neon.md")


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_every_snippet_runs_as_printed(n, transport, tmp_path):
    job = run_snippets(PAGE, n, transport, tmp_path)
    assert job.stdout.count("torch.Size([2, 7])") == n


def test_every_public_name_on_the_page_exists():
    names = re.findall(r"`(torchmn\.[\w.]+)", PAGE)
    assert "torchmn.data.scatter_regions" in names
    for name in names:
        found = torchmn
        for part in name.split(".")[1:]:
            assert hasattr(found, part), name
            found = getattr(found, part)


def test_the_contents_are_the_sections():
    assert_contents_are_the_sections(PAGE)
    for name in re.findall(r"`(examples/\w+\.py)`|\]\((\w[\w-]*\.md)\)", PAGE):
        assert (ROOT / (name[0] or f"docs/{name[1]}")).exists()
