"""docs/sparse-autoencoder.md keeps its word: every snippet runs as printed, alone and on two ranks."""

import re

import pytest

from tests.docs.pages import ROOT, assert_contents_are_the_sections, page, run_snippets

PAGE = page("sparse-autoencoder.md")


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_every_snippet_runs_as_printed(n, transport, tmp_path):
    job = run_snippets(PAGE, n, transport, tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("pictures/*"))] == ["reconstructions.png", "stimuli.png"]
    first, second, tuned = map(
        float, re.findall(r"stack: ([\d.]+), then ([\d.]+); fine-tuned: ([\d.]+)", job.stdout)[0]
    )
    assert second < first and tuned < 1e3


def test_the_contents_are_the_sections():
    assert_contents_are_the_sections(PAGE)
    for name in re.findall(r"`(examples/[\w/]+\.py)`|\]\((\w[\w-]*\.md)\)", PAGE):
        assert (ROOT / (name[0] or f"docs/{name[1]}")).exists()
