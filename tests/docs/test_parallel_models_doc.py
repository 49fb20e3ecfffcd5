"""docs/parallel-models.md keeps its word: every snippet runs as printed, alone and on two ranks."""

import re

import pytest

from tests.docs.pages import assert_contents_are_the_sections, assert_every_section_has_a_snippet, page, run_snippets

PAGE = page("parallel-models.md")
LOSS = """print(f"rank {program['comm'].rank}: loss {program['loss'].item():.5f}, right {program['accuracy']:.3f}")"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[int, str]:
    worlds = {1: "solo", 2: "mpi"}
    return {n: run_snippets(PAGE, n, on, tmp_path_factory.mktemp("page"), LOSS).stdout for n, on in worlds.items()}


def test_every_snippet_runs_with_the_same_loss_on_one_rank_and_on_two(outputs):
    one = re.findall(r"rank \d: loss ([\d.]+)", outputs[1])
    two = re.findall(r"rank \d: loss ([\d.]+)", outputs[2])
    assert (len(one), len(two)) == (1, 2)
    assert [float(loss) for loss in two] == pytest.approx([float(one[0])] * 2, rel=1e-3)


def test_an_evaluation_along_data_is_that_of_one_rank(outputs):
    (one,), two = (re.findall(r"right ([\d.]+)", outputs[n]) for n in (1, 2))
    assert [float(accuracy) for accuracy in two] == pytest.approx([float(one)] * 2, abs=0.002)  # but for rounding


def test_what_is_refused_is_named(outputs):
    assert re.search(r"Sorted.*sort along dim 2.*not supported", outputs[2])


def test_it_has_the_snippets_that_its_sections_promise():
    assert_contents_are_the_sections(PAGE)
    assert_every_section_has_a_snippet(PAGE)
