"""docs/model-parallel.md keeps its word: every snippet runs as printed, and every error is printed as shown."""

import re
from pathlib import Path

import pytest
import torch

import torchmn
from tests._worlds import run_job
from tests.docs.pages import assert_contents_are_the_sections, assert_every_section_has_a_snippet
from torchmn.errors import ComponentError, DelegateError, GraphError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "model-parallel.md").read_text()
BLOCKS = re.findall(r"```(python|text)\n(.*?)```", PAGE, re.DOTALL)
START, *RIGHT = [text for kind, text in BLOCKS if kind == "python" and not text.startswith("# wrong")]
WRONG = [
    (text, " ".join(BLOCKS[place + 1][1].split()))
    for place, (_, text) in enumerate(BLOCKS)
    if text.startswith("# wrong")
]

# Each snippet continues from the first one, all in one job, because starting a job takes longer than they do.
DRIVER = """
import sys
program = {"__name__": "__main__"}
exec(compile(START, "start", "exec"), program)
for place, snippet in enumerate(SNIPPETS):
    exec(compile(snippet, f"snippet {place}", "exec"), dict(program))
    program["comm"].barrier()
    if program["comm"].rank == 0:
        sys.stdout.write(f"ran {place}\\n")  # at once: other ranks print, too
"""


def run_on_threads(snippet, size, timeout=None):
    """The snippet as a file train.py, on ranks that are threads."""

    def rank(comm):
        program = {"__name__": "__main__"}
        exec(compile(START, "start.py", "exec"), program)
        program["comm"] = comm
        exec(compile(snippet, "train.py", "exec"), program)
        return program

    return torchmn.run_threads(rank, size, timeout=timeout)


def test_every_right_snippet_runs_as_printed_on_two_ranks():
    texts = f"START = {START!r}\nSNIPPETS = {RIGHT!r}\n"
    result = run_job(texts + DRIVER, 2, "mpi", timeout=100)
    assert result.returncode == 0, result.output
    assert re.findall(r"ran (\d+)", result.stdout) == [str(place) for place in range(len(RIGHT))], result.output
    loss = re.search(r"after 10 steps: loss ([\d.]+)", result.stdout)
    assert loss and float(loss[1]) < 2.2  # it learns: ten classes begin at log(10) = 2.30
    assert "rank 0: [3.0, 3.0], gradient [6.0, 6.0]" in result.stdout


@pytest.mark.parametrize(("snippet", "printed"), [each for each in WRONG if "did not visit" in each[1]])
def test_every_forgotten_delegate_is_reported_as_printed(snippet, printed):
    with pytest.raises(DelegateError) as error:
        run_on_threads(snippet, 2, timeout=20)
    assert printed in f"DelegateError: {error.value}"


def test_a_graph_that_can_not_run_is_refused_as_printed():
    (wrong,) = [each for each in WRONG if "GraphError" in each[1]]
    with pytest.raises(GraphError) as error:
        run_on_threads(wrong[0], 2, timeout=20)
    printed = wrong[1].replace("rank 0 of 2:", f"rank {str(error.value)[5]} of 2:")  # of whichever rank is first
    assert f"GraphError: {' '.join(str(error.value).split())}" == printed


def test_a_component_that_raises_is_told_as_printed():
    (wrong,) = [each for each in WRONG if "ComponentError" in each[1]]
    with pytest.raises(ComponentError) as error:
        run_on_threads(wrong[0], 2, timeout=20)
    assert f"ComponentError: {' '.join(str(error.value).split())}" == wrong[1]


def test_the_text_of_the_graph_is_as_printed():
    (snippet,) = [text for text in RIGHT if "torchmn.describe" in text]
    building = snippet[: snippet.index("optimizer")]
    for program in run_on_threads(building, 2, timeout=20):
        assert f"{program['text']}\n" in [text for kind, text in BLOCKS if kind == "text"]


def test_a_value_that_is_not_part_of_the_loss_ends_in_the_table_as_printed():
    (wrong,) = [each for each in WRONG if "waits for the gradient" in each[1]]
    with pytest.raises(torchmn.WaitTimeout) as error:
        run_on_threads(wrong[0], 2, timeout=0.5)
    assert wrong[1] in " ".join(str(error.value).split())


def test_data_times_model_runs_on_four_ranks_and_equal_parts_stay_equal():
    """tests/functions/test_data_times_model.py compares the numbers with those of one rank."""
    (snippet,) = [text for text in RIGHT if "equals.size" in text]
    programs = run_on_threads(snippet, 4, timeout=50)
    assert [(each["pair"].rank, each["equals"].rank) for each in programs] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for first, second in ((0, 2), (1, 3)):
        parts = [programs[rank]["part"].state_dict() for rank in (first, second)]
        assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])


def test_it_has_the_snippets_that_its_sections_promise():
    assert_contents_are_the_sections(PAGE)
    assert_every_section_has_a_snippet(PAGE)
    assert len(WRONG) == 7
