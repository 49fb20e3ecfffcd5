"""Signals of Slurm, under each launcher: a checkpoint is saved, and jobs that are queued again resume by themselves."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.experiments import TEXT, losses
from tests.slurm.jobs import OPENMPI, Job, run, sbatch

TORCHMN = f"{sys.executable} -m torchmn.cli.main"
ENDLESS = "shapes.yaml --datapar --epochs 1000000"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "shapes.yaml").write_text(TEXT)
    return tmp_path


def wait_for_steps(job: Job, out: Path, steps: int = 1) -> None:
    job.wait(lambda: job.ended() or ((out / "log.jsonl").exists() and len(losses(out)) >= steps), "step of training")
    assert not job.ended(), job.text()


@pytest.mark.parametrize(
    ("launcher", "library", "signal", "status", "prefix"),
    [
        pytest.param("srun --mpi=pmi2", {}, "USR1", 138, "srun --mpi=pmi2 -n 2 torchmn", id="srun, MPICH, USR1"),
        pytest.param("srun --mpi=pmi2", {}, "TERM", 143, "srun --mpi=pmi2 -n 2 torchmn", id="srun, MPICH, TERM"),
        pytest.param("srun --mpi=pmix", OPENMPI, "USR1", 138, "srun --mpi=pmix -n 2 torchmn", id="srun, Open MPI"),
        pytest.param("mpiexec -n 2", {}, "USR1", 138, "mpiexec -n 2 torchmn", id="mpiexec"),
    ],
)
def test_a_signal_saves_a_checkpoint_and_the_resume_command_names_the_launcher(
    launcher: str, library: dict[str, str], signal: str, status: int, prefix: str, directory: Path
) -> None:
    lines = f'{launcher} {TORCHMN} train {ENDLESS} --out run\necho "status $?"'
    job = sbatch(directory, lines, "-N", "2", "-n", "2", **library)
    wait_for_steps(job, directory / "run")
    job.signal(f"--signal={signal}")  # to the job's steps, as `sbatch --signal` and preemption do
    job.wait(job.ended, "end of the job")
    assert f"status {status}" in job.text().splitlines(), job.text()
    assert f"to continue: {prefix} train {ENDLESS} --resume --out {directory}/run" in job.text().replace("'", "")
    last = re.search(r"stopped after step (\d+)", job.text())
    assert last and len(losses(directory / "run")) == int(last[1])


@pytest.mark.parametrize(("signal", "status"), [("USR1", 138), ("TERM", 143)])
def test_a_step_of_one_task_that_starts_ranks_itself_saves(signal: str, status: int, directory: Path) -> None:
    lines = f'srun --mpi=none -n 1 -c 2 {TORCHMN} train {ENDLESS} -n 2 --out run\necho "status $?"'
    job = sbatch(directory, lines, "-N", "1", "-n", "1", "-c", "2")
    wait_for_steps(job, directory / "run")
    job.signal(f"--signal={signal}")
    job.wait(job.ended, "end of the job")
    assert "stopped after step" in job.text() and f"status {status}" in job.text().splitlines(), job.text()


@pytest.mark.parametrize(
    ("script", "cause"),
    [("mpi", "time limit"), ("mpi", "preemption"), ("torchrun", "time limit"), ("torchrun", "preemption")],
)
def test_a_job_of_new_slurm_saves_is_queued_again_and_resumes(script: str, cause: str, directory: Path) -> None:
    assert run("torchmn", "new", "slurm", cwd=directory).status == 0
    limit = "--time=2" if cause == "time limit" else "--time=60"  # minutes; the script asks for the signal 60 s before
    path = directory / f"slurm-{script}.sbatch"
    job = sbatch(directory, path, "--cpus-per-task=1", limit, arguments=ENDLESS.split())
    wait_for_steps(job, directory / "runs" / f"job-{job.id}")
    if cause == "preemption":
        sbatch(directory, "true", "--partition=urgent", "--nodes=2", "--exclusive")
    job.wait(lambda: job.ended() or job.field("Restarts") == "1", "requeue")
    job.wait(lambda: job.ended() or "resumed after step" in job.text(), "second start")
    stopped, resumed = (re.search(rf"{word} after step (\d+)", job.text()) for word in ("stopped", "resumed"))
    assert stopped and resumed and stopped[1] == resumed[1], job.text()


def test_a_cancelled_job_of_new_slurm_saves_and_is_not_queued_again(directory: Path) -> None:
    assert run("torchmn", "new", "slurm", cwd=directory).status == 0
    job = sbatch(directory, directory / "slurm-mpi.sbatch", "--cpus-per-task=1", arguments=ENDLESS.split())
    wait_for_steps(job, directory / "runs" / f"job-{job.id}")
    job.signal()
    job.wait(lambda: job.field("JobState") == "CANCELLED", "end of the job")
    job.wait(lambda: "stopped after step" in job.text(), "checkpoint")
    assert job.field("Restarts") == "0"
