"""Checks under Slurm: the allocation, the types of `srun --mpi=TYPE`, and ranks that srun starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping

from torchmn.cli.checks.finding import Finding, fail, ok, warn
from torchmn.cli.checks.probing import PROBE, rank_finding, run_probe
from torchmn.cli.launch.mpi_installation import LIBRARY_VARIABLE, LoadedLibrary
from torchmn.communicators.launchers import pmi
from torchmn.communicators.launchers.environment import cleared, detect

MPIEXEC = "start the ranks with mpiexec instead of srun, inside of sbatch or salloc"
CHDIR_FAILED = "couldn't chdir to"
STEPS = ("SLURM_STEP_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_MPI_TYPE")


def findings(loaded: LoadedLibrary | None, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Runs the checks; none without Slurm's srun.

    Args:
        loaded: the MPI library that mpi4py loads; None if there is none.
        environ: the environment variables.
    """
    if not shutil.which("srun", path=environ.get("PATH")):
        return
    if environ.get("SLURM_JOB_ID"):
        yield allocation(environ)
    types = mpi_types()
    if types or environ.get("SLURM_JOB_ID"):  # not on a machine where Slurm is installed and does not run
        yield types_finding(types, loaded)
    kind = loaded and pmi.fitting(loaded.version)
    if pmi.offered(environ):
        yield this_step(loaded, environ)
    elif environ.get("SLURM_JOB_ID") and kind in types:
        yield ranks_under_srun(str(kind), environ)


def allocation(environ: Mapping[str, str]) -> Finding:
    """Returns what Slurm has allocated to this job."""
    nodes = f"{environ.get('SLURM_JOB_NUM_NODES', '?')} nodes ({environ.get('SLURM_JOB_NODELIST', '?')})"
    tasks = f"{environ.get('SLURM_NTASKS') or 'an unset number of'} tasks"
    cores = f"{environ.get('SLURM_CPUS_PER_TASK') or 1} CPUs each"
    return ok("slurm allocation", f"job {environ['SLURM_JOB_ID']}: {tasks} with {cores} on {nodes}")


def mpi_types() -> list[str]:
    """Returns the types that `srun --mpi=list` prints; empty if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_MPI_TYPE"}
    try:
        listed = subprocess.run(
            ["srun", "--mpi=list"],
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    words = (line.rpartition(":")[2].strip() for line in (listed.stdout + listed.stderr).splitlines())  # "srun: pmi2"
    return sorted(word for word in words if word and " " not in word)


def types_finding(types: list[str], loaded: LoadedLibrary | None) -> Finding:
    """Checks that srun has a type that fits the MPI library."""
    check, found = "srun --mpi types", ", ".join(types)
    if not types:
        return warn(check, "`srun --mpi=list` shows none", MPIEXEC)
    if loaded is None:
        return ok(check, f"{found}; without an MPI library, start one torchrun per node: `torchmn new slurm`")
    kind = pmi.fitting(loaded.version)
    if kind is None:
        return warn(check, found, f"try each with {loaded.version}, or {MPIEXEC}")
    if kind not in types:
        return warn(check, f"{found}, but {loaded.version} needs {kind}", MPIEXEC)
    return ok(check, f"{found}; {loaded.version} needs `srun --mpi={kind}`")


def this_step(loaded: LoadedLibrary | None, environ: Mapping[str, str]) -> Finding:
    """Checks the type with which srun has started this process."""
    check, launch = "this step", detect(environ)
    found = f"rank {launch.rank} of {launch.size}, started by `srun --mpi={pmi.offered(environ)}`"
    problem = loaded and pmi.srun_problem(loaded.version, environ)
    if problem and launch.may_be_several:
        kind = pmi.fitting(str(loaded and loaded.version))
        return fail(check, f"{found}: the ranks do not find each other", f"use `srun --mpi={kind}`, or {MPIEXEC}")
    return ok(check, found)


def ranks_under_srun(kind: str, environ: Mapping[str, str]) -> Finding:
    """Checks that ranks which srun starts reach each other: one on each node, or two on a single one."""
    check = f"srun --mpi={kind}"
    nodes, tasks = (int(environ.get(name) or 1) for name in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS"))
    size = max(2, nodes)
    if tasks < size:
        return ok(check, f"not tried: the job has {tasks} task(s), and {size} are needed")
    environment = {name: value for name, value in cleared(environ).items() if not name.startswith(STEPS)}
    command = ["srun", f"--mpi={kind}", "--overlap", "-N", str(nodes), "-n", str(size), sys.executable, PROBE, "mpi"]
    advice = f"compare the MPI library ({LIBRARY_VARIABLE}) and Slurm's plugin, or {MPIEXEC}"
    result = run_probe(command, environment)
    elsewhere = [line for line in result.warnings.splitlines() if CHDIR_FAILED in line]
    if elsewhere:  # Slurm starts the rank nevertheless, in /tmp
        advice = "submit the job in a directory that all nodes have, or pass one: `srun --chdir=DIR`"
        return fail(check, elsewhere[0].removeprefix("slurmstepd-"), advice)
    return rank_finding(check, result, size, advice)
