"""The table of launchers: variables of each launcher, nested launchers, and errors."""

from __future__ import annotations

import pytest

from torchmn.communicators.launchers.environment import LAUNCHERS, NO_LAUNCHER, Launch, cleared, detect
from torchmn.errors import LaunchError

HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "3",
}
INTEL = {**HYDRA, "I_MPI_MPIRUN": "mpirun", "I_MPI_ROOT": "/opt/intel/mpi"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
}
# mpiexec -pmi-port, and prterun: what they set here.
PMI_PORT = {"PMI_ID": "1", "PMI_PORT": "node1:43193", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PRTERUN = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-node1-6644@1", "PMIX_SERVER_TMPDIR": "/tmp/prtrn.6644"}
# Launchers that are not here: the variables by which each of them numbers its processes.
ELSEWHERE = {
    "mvapich3": {"MVP_COMM_WORLD_RANK": "1", "MVP_COMM_WORLD_SIZE": "2", "MVP_COMM_WORLD_LOCAL_RANK": "1"},
    "mpirun_rsh": {"MPIRUN_RANK": "1", "MPIRUN_NPROCS": "2", "MPIRUN_ID": "2711"},
    "pals": {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "0"},
    "jsm": {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1"},
    "flux": {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "1"},
    "alps": {"ALPS_APP_PE": "1", "ALPS_APP_DEPTH": "1"},
    "poe": {"MP_CHILD": "1", "MP_PROCS": "2"},
    "nec": {"MPIRANK": "1", "MPISIZE": "2", "MPIUNIVERSE": "0"},
    "platform": {"MPI_RANKID": "1", "MPI_NRANKS": "2"},
    "mpt": {"MPT_MPI_RANK": "1"},
    "horovod": {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1"},
}
ALLOCATION = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node[1-2]"}
SRUN = {
    **ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {**BY_HAND, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
TORCHMN_RUN = {**BY_HAND, "TORCHMN_RUN": "gloo"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, NO_LAUNCHER, id="none"),
        pytest.param(HYDRA, Launch("mpich", "mpi", 2, 4, 0), id="mpich"),
        pytest.param(OPEN_MPI, Launch("openmpi", "mpi", 3, 6, 1), id="open mpi"),
        pytest.param(INTEL, Launch("intelmpi", "mpi", 2, 4, 0), id="intel mpi"),
        pytest.param(MVAPICH, Launch("mvapich", "mpi", 1, 2, 0), id="mvapich"),
        pytest.param(PMI_PORT, Launch("pmi_port", "mpi", 1, None, 1, local_size=2), id="mpich with -pmi-port"),
        pytest.param(PRTERUN, Launch("pmix", "mpi", 1, None, None), id="prterun"),
        pytest.param(SRUN, Launch("slurm", "mpi", 5, 8, 1), id="slurm"),
        pytest.param(TORCHRUN, Launch("torchrun", "torch", 1, 2, 1), id="torchrun"),
        pytest.param(TORCHMN_RUN, Launch("torchmn", "torch", 1, 2, 1), id="torchmn run"),
        pytest.param(BY_HAND, Launch("env", "torch", 1, 2, 1), id="variables set by hand"),
    ],
)
def test_each_launcher_is_recognised(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize("name", ELSEWHERE)
def test_whatever_numbers_this_process_means_mpi_and_at_least_so_many_ranks(name):
    launch = detect(ELSEWHERE[name])
    assert (launch.name, launch.transport, launch.rank, launch.min_size) == (name, "mpi", 1, 2)
    assert launch.size in (2, None) and launch.may_be_several
    without_size = {key: value for key, value in ELSEWHERE[name].items() if key.endswith(("RANK", "ID", "PE", "CHILD"))}
    if "COMM_WORLD" not in "".join(without_size):
        assert detect(without_size).min_size == 2


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_DEBUG": "1", "PMI_HOSTNAME": "node1", "PMI_MMAP_SYNC_WAIT_TIME": "300"},
        {"PMIX_MCA_gds": "hash", "PMIX_MCA_psec": "native", "PMIX_NAMESPACE": "left-over"},
        {"PALS_NODEID": "0", "PALS_SPOOL_DIR": "/tmp"},
        {"FLUX_URI": "local:///run/flux", "FLUX_JOB_ID": "f1"},
        {"MP_PROCS": "4", "MP_EUIDEVICE": "en0"},
        {"HOROVOD_FUSION_THRESHOLD": "1", "MPIRUN_OPTIONS": "-v", "MPI_LOCALNRANKS": "2", "JSM_GPU_ASSIGNMENTS": "0"},
    ],
)
def test_settings_of_launchers_and_libraries_are_no_launcher(environ):
    assert detect(environ) == NO_LAUNCHER


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # In an allocation, mpiexec starts its daemons with srun: the ranks carry the daemon's SLURM_PROCID.
        pytest.param({**SRUN, "SLURM_PROCID": "1", **HYDRA}, "mpich", id="mpiexec in a Slurm allocation"),
        pytest.param({**SRUN, "SLURM_PROCID": "1", **OPEN_MPI}, "openmpi", id="mpirun in a Slurm allocation"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1", **OPEN_MPI}, "openmpi", id="srun's PMI around mpirun"),
        pytest.param({**SRUN, **TORCHRUN}, "torchrun", id="one torchrun per host, started by srun"),
        pytest.param({**HYDRA, **TORCHRUN}, "torchrun", id="one torchrun per host, started by mpiexec"),
        pytest.param({**BY_HAND, **HYDRA}, "mpich", id="mpiexec in a container with leftover RANK"),
        pytest.param({**BY_HAND, **OPEN_MPI}, "openmpi", id="mpirun in a container with leftover RANK"),
        pytest.param({**BY_HAND, **SRUN}, "slurm", id="srun in a container with leftover RANK"),
        pytest.param({**SRUN, **TORCHMN_RUN}, "torchmn", id="torchmn run in a Slurm step"),
        pytest.param({**TORCHMN_RUN, **HYDRA}, "mpich", id="mpiexec started by a rank of torchmn run"),
        pytest.param({**SRUN, "SLURM_PROCID": "0", **PRTERUN}, "pmix", id="prterun in a Slurm allocation"),
        pytest.param(
            {**SRUN, "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.77.0"}, "slurm", id="srun with Slurm's PMIx"
        ),
        pytest.param({**ELSEWHERE["flux"], **HYDRA}, "mpich", id="Flux, which serves PMI"),
        pytest.param({**ELSEWHERE["pals"], **TORCHRUN}, "torchrun", id="one torchrun per host, started by PALS"),
        pytest.param({**PRTERUN, **TORCHRUN}, "torchrun", id="one torchrun per host, started by prterun"),
        pytest.param({**HYDRA, "I_MPI_ROOT": "/opt/intel/mpi"}, "mpich", id="mpich where Intel's set-up ran"),
    ],
)
def test_the_innermost_launcher_wins(environ, expected):
    assert detect(environ).name == expected


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(ALLOCATION, id="salloc"),
        pytest.param(BATCH, id="sbatch"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967291"}, id="sbatch with the batch step's number"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "4294967290"}, id="salloc with an interactive step"),
        pytest.param({**BATCH, "SLURM_STEP_ID": "batch"}, id="a step by name"),
        pytest.param(
            {**BATCH, "SLURM_STEP_ID": "4294967290", "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.77.4294967290"},
            id="salloc with an interactive step and Slurm's PMIx",
        ),
        pytest.param({**ALLOCATION, "SLURM_STEP_ID": "0"}, id="a step without a task"),
        pytest.param({"PMI_RANK": "", "RANK": ""}, id="emptied variables"),
        pytest.param({"WORLD_SIZE": "8", "MASTER_ADDR": "node1"}, id="a batch script's export for torchrun"),
        pytest.param({"LOCAL_RANK": "1"}, id="a local rank alone"),
    ],
)
def test_one_process_without_a_launcher_is_a_world_of_one(environ):
    assert detect(environ) == NO_LAUNCHER


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "slurm"),
        (
            {
                **SRUN,
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
                "PMIX_RANK": "0",
                "PMIX_NAMESPACE": "slurm.pmix.77.0",
            },
            "slurm",
        ),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1", "FLUX_TASK_LOCAL_ID": "0"}, "flux"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "env"),
    ],
)
def test_a_shell_of_one_task_needs_no_transport(environ, name):
    assert detect(environ) == Launch(name, "solo", 0, 1, 0)


def test_the_step_s_number_of_tasks_counts_and_not_the_job_s():
    assert detect({**SRUN, "SLURM_NTASKS": "64"}).size == 8


def test_local_rank_is_none_where_the_launcher_does_not_tell():
    assert detect({"PMI_RANK": "1", "PMI_SIZE": "2"}).local_rank is None


def test_local_rank_is_slurm_s_under_srun_with_pmi2():
    environ = {"PMI_RANK": "5", "PMI_SIZE": "8", **SRUN}
    assert detect(environ) == Launch("mpich", "mpi", 5, 8, 1)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PMI_RANK": "1"}, ["PMI_RANK=1", "PMI_SIZE"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE"]),
        ({"RANK": "3"}, ["RANK=3", "WORLD_SIZE"]),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
            ["SLURM_PROCID=0", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        ),
        ({**HYDRA, "PMI_RANK": "4"}, ["PMI_RANK=4", "PMI_SIZE=4"]),
        ({**HYDRA, "PMI_RANK": "-1"}, ["PMI_RANK", "'-1'"]),
        ({**HYDRA, "PMI_SIZE": "four"}, ["PMI_SIZE", "'four'"]),
        ({**HYDRA, "PMI_SIZE": "4.0"}, ["PMI_SIZE", "'4.0'"]),
        ({**HYDRA, "PMI_RANK": "²"}, ["PMI_RANK", "'²'"]),
        ({**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "0"}, ["PMI_RANK=0", "PMI_SIZE=0"]),
        ({**HYDRA, "MPI_LOCALRANKID": "4"}, ["MPI_LOCALRANKID=4", "PMI_SIZE=4"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK=0", "WORLD_SIZE=2", "MASTER_ADDR", "MASTER_PORT"]),
        ({**TORCHRUN, "MASTER_PORT": ""}, ["RANK=1", "MASTER_PORT"]),
        ({**TORCHRUN, "WORLD_SIZE": "1"}, ["RANK=1", "WORLD_SIZE=1"]),
    ],
)
def test_contradictory_variables_are_refused_by_name(environ, words):
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "environ",
    [HYDRA, OPEN_MPI, INTEL, MVAPICH, PMI_PORT, PRTERUN, *ELSEWHERE.values(), TORCHRUN, TORCHMN_RUN, BY_HAND],
)
def test_a_cleared_environment_has_no_launcher(environ):
    kept = {"PATH": "/bin", "OMPI_MCA_btl": "self", "PRTE_MCA_plm": "ssh", "SLURM_JOB_ID": "77"}
    left = cleared({**environ, **kept})
    assert detect(left) == NO_LAUNCHER
    assert kept.items() <= left.items()


def test_names_are_unique():
    names = [launcher.name for launcher in LAUNCHERS]
    assert len(names) == len(set(names))
