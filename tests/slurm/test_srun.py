"""Ranks that srun starts: they find each other, or every rank raises an error that names the type of --mpi to use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import OPENMPI, SUM, run, srun

GROUP = """
import torch, torchmn
from torch.utils.data import DistributedSampler
torchmn.init_process_group(torchmn.create_communicator())
group, x = torch.distributed, torch.ones(1) + torch.distributed.get_rank()
group.all_reduce(x)
mine = list(DistributedSampler(range(4), shuffle=False))
print(f"rank {group.get_rank()} of {group.get_world_size()} sum {x.item()} {mine}")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SUM)
    return str(path)


@pytest.mark.parametrize(("kind", "library"), [("pmi2", {}), ("pmix", OPENMPI)], ids=["MPICH", "Open MPI"])
def test_ranks_on_two_nodes_find_each_other(kind: str, library: dict[str, str], script: str) -> None:
    result = srun(kind, sys.executable, script, **library)
    assert result.status == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("rank")]
    assert sorted(lines) == ["rank 0 of 2 sum 3.0", "rank 1 of 2 sum 3.0"]


@pytest.mark.parametrize(
    ("kind", "library", "use"),
    [
        pytest.param("none", {}, "pmi2", id="none with MPICH"),
        pytest.param("pmix", {}, "pmi2", id="pmix with MPICH"),
        pytest.param("none", OPENMPI, "pmix", id="none with Open MPI"),
        pytest.param("pmi2", OPENMPI, "pmix", id="pmi2 with Open MPI"),
    ],
)
def test_with_another_type_every_rank_raises_and_names_the_one_to_use(
    kind: str, library: dict[str, str], use: str, script: str
) -> None:
    result = srun(kind, sys.executable, script, **library)
    assert result.status == 1, result.output
    for rank in (0, 1):
        (line,) = [line for line in result.output.splitlines() if f"LaunchError: rank {rank}: " in line]
        assert f"--mpi={kind}, and " in line and f"use `srun --mpi={use}`" in line


def test_a_second_program_in_one_step_raises_an_error_that_asks_for_a_second_srun(script: str) -> None:
    result = srun("pmi2", "sh", "-c", f"{sys.executable} {script} && {sys.executable} {script}")
    assert result.output.count("of 2 sum 3.0") == 2 and result.status == 1
    for rank in (0, 1):
        assert f"LaunchError: rank {rank}: another MPI program has already run and ended" in result.output
    assert "its own srun" in result.output and "PMI_Init" not in result.output


@pytest.mark.parametrize("library", [{}, OPENMPI], ids=["MPICH", "Open MPI"])
def test_mpiexec_in_an_allocation_uses_its_nodes(library: dict[str, str], script: str) -> None:
    directory = Path(library["MPI4PY_LIBMPI"]).parents[1] / "bin" if library else Path(sys.executable).parent
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpiexec = [str(directory / "mpiexec"), "-n", "2", sys.executable, script]
    result = run("salloc", "-N", "2", "-n", "2", *mpiexec, **library, **root)
    assert result.status == 0 and result.output.count("of 2 sum 3.0") == 2, result.output


def test_the_process_group_of_torch_has_the_ranks_of_srun(tmp_path: Path) -> None:
    path = tmp_path / "group.py"
    path.write_text(GROUP)
    result = srun("pmi2", sys.executable, str(path))
    assert result.status == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("rank")]
    assert sorted(lines) == ["rank 0 of 2 sum 3.0 [0, 2]", "rank 1 of 2 sum 3.0 [1, 3]"]
