"""docs/clusters.md: its script saves when one rank gets the signal, and its contents are its sections."""

from __future__ import annotations

import re

import pytest

from tests._worlds import run_job
from tests.docs.pages import ROOT, assert_contents_are_the_sections, page, snippets

PAGE = page("clusters.md")


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_its_script_stops_all_ranks_at_the_signal_of_one_and_resumes(n, transport, tmp_path):
    (script,) = snippets(PAGE)
    script = script.replace('path="checkpoints"', f"path={str(tmp_path / 'checkpoints')!r}")
    first = "    optimizer.zero_grad()\n"
    last_rank = "    if step == 3 and comm.rank == comm.size - 1:\n        signal.raise_signal(signal.SIGUSR1)\n"
    stopping = script.replace(first, last_rank + first)
    stopped = run_job(stopping, n, transport)
    assert stopped.returncode == 138, stopped.output
    resumed = run_job(f"{script}\nprint('began after', done)", n, transport)
    assert resumed.returncode == 0 and resumed.stdout.count("began after 3") == n, resumed.output


def test_its_contents_and_file_names_exist():
    assert_contents_are_the_sections(PAGE)
    assert set(re.findall(r"slurm-\w+\.sbatch", PAGE)) == {file.name for file in (ROOT / "torchmn").rglob("*.sbatch")}
