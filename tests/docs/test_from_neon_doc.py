"""docs/from-neon.md: snippets run as printed, on one rank and on two; the test errors are as expected."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import (
    assert_contents_are_the_sections,
    assert_public_names_and_links_exist,
    page,
    run_snippets,
)

PAGE = page("from-neon.md")
TOOL = Path(__file__).parents[2] / "benchmarks" / "neon_results.py"
spec = importlib.util.spec_from_file_location("neon_results", TOOL)
assert spec is not None and spec.loader is not None
neon_results = importlib.util.module_from_spec(spec)
sys.modules["neon_results"] = neon_results  # for its dataclasses
spec.loader.exec_module(neon_results)


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_every_snippet_runs_as_printed(n, transport, tmp_path):
    job = run_snippets(PAGE, n, transport, tmp_path)
    assert job.stdout.count("torch.Size([2, 7])") == n


def test_the_page_names_what_exists():
    assert_contents_are_the_sections(PAGE)
    assert_public_names_and_links_exist(PAGE)


def measured(name: str) -> Any:
    """The result that the page shows of a network."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name} | ")]
    cells = line.strip("| ").split(" | ")
    errors = [float(cell.removesuffix(" %")) for cell in cells[4:8]]
    by_mode = dict(zip(("one rank", *neon_results.MODES), errors, strict=True))
    return neon_results.Result(neon_results.NETWORKS[name], int(cells[1]), by_mode, float(cells[8]))


@pytest.mark.parametrize("name", neon_results.NETWORKS)
def test_the_page_has_errors_within_their_bounds_the_same_in_each_mode(name):
    result = measured(name)
    assert result.epochs == result.network.epochs and result.passed
    assert result.row(name) in PAGE


def test_a_new_result_replaces_the_row_of_its_network_only():
    name, *others = neon_results.NETWORKS
    worse = replace(measured(name), errors=dict.fromkeys(measured(name).errors, 2.31))
    changed = neon_results.updated_page(PAGE, {name: worse})
    assert worse.row(name) in changed and measured(name).row(name) not in changed
    assert all(measured(other).row(other) in changed for other in others)
    assert not worse.passed
    assert not replace(measured(name), difference=1e-6).passed
    assert not replace(measured(name), errors=measured(name).errors | {"datapar": 2.06}).passed
