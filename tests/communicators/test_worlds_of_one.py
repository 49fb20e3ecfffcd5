"""A process that a launcher started as one of several never gets a world of one; one that was started alone does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests._worlds.launch import OPENMPI_PREFIX, ROOT, clean_environment
from tests._worlds.warm_start.servers import warm_environment
from tests.communicators.test_launchers import ELSEWHERE
from torchmn.communicators.creation import create
from torchmn.communicators.launchers.environment import detect

BESIDE_PYTHON = Path(sys.executable).parent
SECONDS = 100
SCRIPT = Path(__file__).with_name("world_of_one.py")
OPENMPI_LIBRARY = {"MPI4PY_LIBMPI": str(OPENMPI_PREFIX / "lib" / "libmpi.so.40")}
PYTHON = [sys.executable]
LAUNCHERS = {
    "torchrun": [str(BESIDE_PYTHON / "torchrun"), "--nproc-per-node"],
    "torchmn": [*PYTHON, "-m", "torchmn.cli.main", "run", "--transport", "gloo", "-n"],
    "mpiexec": [str(BESIDE_PYTHON / "mpiexec"), "-n"],
    "pmi_port": [str(BESIDE_PYTHON / "mpiexec"), "-pmi-port", "-n"],
    "gforker": [str(BESIDE_PYTHON / "mpiexec.gforker"), "-n"],
    "prterun": [str(OPENMPI_PREFIX / "bin" / "prterun"), "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "-n"],
}
STARTS_A_SCRIPT = ("torchrun", "torchmn")


def started(launcher: str, size: int, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, list[str], str]:
    """The exit status of `size` ranks that create a communicator, the worlds that they got, and all they printed."""
    start = LAUNCHERS[launcher]
    if not shutil.which(start[0]):
        pytest.skip(f"{start[0]} is not installed")
    python = [] if launcher in STARTS_A_SCRIPT else PYTHON
    return ended([*start, str(size), *python], arguments, OPENMPI_LIBRARY if launcher == "prterun" else {}, env)


def ended(command: list[str], arguments: tuple[str, ...], *env: dict[str, str] | None) -> tuple[int, list[str], str]:
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1", **warm_environment([str(ROOT)])}
    for added in env:
        environment |= added or {}
    result = subprocess.run(
        [*command, str(SCRIPT), *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=SECONDS,
    )
    output = result.stdout.decode(errors="replace")
    worlds = sorted(line[line.index("world ") :] for line in output.splitlines() if "world " in line and " of " in line)
    return result.returncode, worlds, output


BOTH = ["world 0 of 2", "world 1 of 2"]


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("torchrun", "naive"),
        ("torchmn", "flat"),
        ("mpiexec", "naive"),
        ("pmi_port", "auto"),
        ("gforker", "auto"),
        ("prterun", "auto"),
    ],
)
def test_ranks_that_were_started_together_are_one_world(launcher: str, name: str) -> None:
    status, worlds, output = started(launcher, 2, name)
    assert (status, worlds) == (0, BOTH), output


@pytest.mark.parametrize(
    ("launcher", "name", "words"),
    [
        ("torchrun", "mpi", ["according to torchrun there are 2 ranks", "sees 1", "gloo", "use 'auto'", "mpiexec"]),
        ("torchmn", "mpi", ["according to torchmn run there are 2 ranks", "sees 1", "gloo", "use 'auto'"]),
        ("prterun", "solo", ["'solo'", "PMIx", "Use 'auto'", "split"]),
        ("pmi_port", "solo", ["'solo'", "-pmi-port", "rank 1 of 2", "Use 'auto'"]),
        ("pmi_port", "gloo", ["'gloo' needs the number of ranks", "-pmi-port", "'auto'"]),
    ],
)
def test_many_worlds_of_one_are_refused_on_every_rank(launcher: str, name: str, words: list[str]) -> None:
    status, worlds, output = started(launcher, 2, name)
    assert status != 0 and worlds == [], output
    assert [word for word in words if word not in output] == [], output


def test_a_library_that_does_not_belong_to_the_launcher_is_refused() -> None:
    if not Path(OPENMPI_LIBRARY["MPI4PY_LIBMPI"]).exists():
        pytest.skip(f"Open MPI is not at {OPENMPI_PREFIX}")
    status, worlds, output = started("pmi_port", 2, "auto", env=OPENMPI_LIBRARY)
    assert status != 0 and worlds == [] and "belong to different MPIs" in output, output


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("torchrun", "mpi"),
        ("torchrun", "auto"),
        ("torchmn", "naive"),
        ("mpiexec", "auto"),
        ("pmi_port", "auto"),
        ("pmi_port", "solo"),
        ("prterun", "auto"),
    ],
)
def test_a_job_that_was_started_with_one_process_is_a_world_of_one(launcher: str, name: str) -> None:
    status, worlds, output = started(launcher, 1, name)
    assert (status, worlds) == (0, ["world 0 of 1"]), output


def test_a_world_of_one_that_was_passed_is_no_mistake() -> None:
    status, worlds, output = started("torchrun", 2, "mpi", "COMM_SELF")
    assert (status, worlds) == (0, ["world 0 of 1"] * 2), output


def test_a_communicator_of_mpi_means_mpi_without_a_launcher_too() -> None:
    assert ended(PYTHON, ("naive", "COMM_WORLD"))[:2] == (0, ["world 0 of 1"])


@pytest.mark.parametrize("launcher", ELSEWHERE)
def test_under_every_launcher_a_world_of_mpi_that_is_too_small_is_refused(launcher: str) -> None:
    launch = detect(ELSEWHERE[launcher])
    assert "different MPIs" in str(create._world_problem(launch, seen=1, given=False))
    assert create._world_problem(launch, seen=2, given=False) is None


def test_under_a_launcher_that_mpi_does_not_see_auto_is_refused() -> None:
    status, worlds, output = ended(PYTHON, ("auto",), ELSEWHERE["pals"])
    assert status != 0 and worlds == [], output
    assert "rank 1: according to PALS there are at least 2 ranks" in output and "sees 1" in output, output
