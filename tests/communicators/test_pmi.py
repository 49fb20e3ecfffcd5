"""What srun offers to MPI, and what each MPI needs: errors name the type of `srun --mpi=TYPE` to use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._worlds.launch import clean_environment
from tests.communicators.test_launchers import HYDRA, OPEN_MPI, SRUN
from torchmn.communicators.launchers import pmi

# As Slurm 22.05 sets them.
PMI2 = {**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "11", "PMI_JOBID": "5.0"}
PMIX = {**SRUN, "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.77.0"}
MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi"
MPICH_WITH_PMIX = f"{MPICH} --with-pmix=/usr"
CRAY_MPICH = "MPI VERSION    : CRAY MPICH version 8.1.28 (ANL base 3.4a2)"
OPENMPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution"


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        pytest.param(SRUN, "none", id="none"),
        pytest.param(PMI2, "pmi2", id="pmi2"),
        pytest.param(PMIX, "pmix", id="pmix"),
        pytest.param({**SRUN, **HYDRA}, None, id="mpiexec in an allocation"),
        pytest.param({**SRUN, **OPEN_MPI}, None, id="mpirun in an allocation"),
        pytest.param(HYDRA, None, id="mpiexec"),
        pytest.param({}, None, id="no launcher"),
    ],
)
def test_type_of_srun_is_known_from_its_variables(environ: dict[str, str], kind: str | None) -> None:
    assert pmi.offered(environ) == kind


@pytest.mark.parametrize(
    ("environ", "library", "use"),
    [
        (SRUN, MPICH, "srun --mpi=pmi2"),
        (SRUN, OPENMPI, "srun --mpi=pmix"),
        (PMI2, OPENMPI, "srun --mpi=pmix"),
        (PMIX, MPICH, "srun --mpi=pmi2"),
        (PMI2, MPICH, None),
        (PMIX, OPENMPI, None),
        (PMIX, MPICH_WITH_PMIX, None),
        (SRUN, "Some other MPI", None),
        ({**SRUN, **HYDRA}, OPENMPI, None),
    ],
)
def test_advice_names_the_type_that_fits_the_library(environ: dict[str, str], library: str, use: str | None) -> None:
    problem = pmi.srun_problem(library, environ)
    assert problem is None if use is None else use in str(problem)


@pytest.mark.parametrize(
    ("environ", "library", "ends"),
    [(PMIX, MPICH, True), (PMIX, MPICH_WITH_PMIX, False), (PMIX, CRAY_MPICH, False), (SRUN, MPICH, False)],
)
def test_only_a_library_that_would_end_the_process_is_refused_before_it_starts(
    environ: dict[str, str], library: str, ends: bool
) -> None:
    assert (pmi.unusable(library, environ) is not None) == ends


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """The launcher's end of PMI_FD, and the environment of the rank."""
    launcher, rank = socket.socketpair()
    with launcher, rank:
        yield launcher, {"PMI_FD": str(rank.fileno())}


def test_a_launcher_that_still_listens_is_not_used_up(connection: tuple[socket.socket, dict[str, str]]) -> None:
    launcher, environ = connection
    assert pmi.used_up(environ) is None
    launcher.send(b"cmd=")
    assert pmi.used_up(environ) is None
    assert os.read(int(environ["PMI_FD"]), 9) == b"cmd=", "nothing is taken from MPI"


def test_a_launcher_that_has_closed_its_end_is_used_up(connection: tuple[socket.socket, dict[str, str]]) -> None:
    launcher, environ = connection
    launcher.close()
    assert "its own mpiexec" in str(pmi.used_up(environ))
    assert "its own srun" in str(pmi.used_up({**PMI2, **environ}))


@pytest.mark.parametrize("descriptor", ["", "999999", "x"])
def test_a_left_over_pmi_fd_is_no_connection(descriptor: str) -> None:
    assert pmi.used_up({"PMI_FD": descriptor}) is None


def test_the_second_program_under_one_mpiexec_raises_instead_of_dying_in_mpi_init(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torchmn\ncomm = torchmn.create_communicator()\nprint('size', comm.size, flush=True)\n")
    once = f"{sys.executable} {script}"
    result = subprocess.run(
        [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", "sh", "-c", f"{once} && {once}"],
        env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert result.stdout.count("size 2") == 2
    assert "LaunchError: rank 0: another MPI program has already run and ended under this mpiexec" in result.stderr
    assert "PMI_Init" not in result.stderr
