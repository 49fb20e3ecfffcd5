"""`torchmn doctor` in an allocation and in a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import OPENMPI, Result, run, sbatch, srun

DOCTOR = (sys.executable, "-m", "torchmn.cli.main", "doctor", "--json")


def findings(result: Result) -> dict[str, dict[str, str]]:
    """Returns the findings by check, from output with lines of Slurm around them."""
    text = result.output
    report = json.loads(text[text.index("{\n") : text.rindex("\n}") + 2])
    return {finding["check"]: finding for finding in report["checks"]}


@pytest.mark.parametrize(("kind", "library"), [("pmi2", {}), ("pmix", OPENMPI)], ids=["MPICH", "Open MPI"])
def test_in_an_allocation_it_names_the_type_that_fits_and_ranks_reach_each_other(
    kind: str, library: dict[str, str]
) -> None:
    found = findings(run("salloc", "-N", "2", "-n", "2", *DOCTOR, **library))
    assert "2 tasks with 1 CPUs each on 2 nodes (node[1-2])" in found["slurm allocation"]["found"]
    types = found["srun --mpi types"]["found"]
    assert all(name in types for name in ("none", "pmi2", "pmix")) and f"needs `srun --mpi={kind}`" in types
    assert found[f"srun --mpi={kind}"] == {
        "level": "ok",
        "check": f"srun --mpi={kind}",
        "found": "2 ranks on node1, node2 reach each other, and their sum is correct",
        "advice": "",
    }


@pytest.mark.parametrize(("kind", "level"), [("none", "FAIL"), ("pmi2", "ok")])
def test_in_a_step_one_rank_reports_whether_its_type_fits(kind: str, level: str) -> None:
    result = srun(kind, *DOCTOR, nodes=1)
    step = findings(result)["this step"]
    assert step["level"] == level and f"rank 0 of 2, started by `srun --mpi={kind}`" in step["found"]
    assert (result.status == 0) == (level == "ok")
    assert ("use `srun --mpi=pmi2`" in step["advice"]) == (level == "FAIL")


def test_in_a_batch_script_it_reads_the_allocation_and_starts_ranks(tmp_path: Path) -> None:
    job = sbatch(tmp_path, " ".join(DOCTOR), "-N", "2", "-n", "2")
    job.wait(job.ended, "end of the job")
    found = findings(Result(0, job.text()))
    assert "2 tasks with 1 CPUs each on 2 nodes (node[1-2])" in found["slurm allocation"]["found"]
    assert found["srun --mpi=pmi2"]["level"] == "ok"


def test_a_working_directory_that_nodes_do_not_have_is_named() -> None:
    result = run("salloc", "-N", "2", "-n", "2", *DOCTOR, SLURM_REMOTE_CWD="/no/such/directory")  # of each srun
    finding = findings(result)["srun --mpi=pmi2"]
    assert finding["level"] == "FAIL" and "/no/such/directory" in finding["found"] and "node" in finding["found"]
    assert "srun --chdir=DIR" in finding["advice"]
