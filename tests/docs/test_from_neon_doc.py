"""docs/from-neon.md keeps its word: every snippet runs as printed, alone and on two ranks."""

import pytest

from tests.docs.pages import (
    assert_contents_are_the_sections,
    assert_public_names_and_links_exist,
    page,
    run_snippets,
)

PAGE = page("from-neon.md")


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_every_snippet_runs_as_printed(n, transport, tmp_path):
    job = run_snippets(PAGE, n, transport, tmp_path)
    assert job.stdout.count("torch.Size([2, 7])") == n


def test_the_page_names_what_exists():
    assert_contents_are_the_sections(PAGE)
    assert_public_names_and_links_exist(PAGE)
