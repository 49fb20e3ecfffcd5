"""create_communicator: names, keywords, and errors that name a remedy."""

from __future__ import annotations

import math

import pytest
import torch

import torchmn
from tests._worlds import run_job
from torchmn.communicators.creation import create

LAUNCHER_VARIABLES = ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in LAUNCHER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_without_a_launcher_auto_is_a_world_of_one() -> None:
    with torchmn.create_communicator() as comm:
        assert (comm.rank, comm.size, comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size) == (
            0,
            1,
            0,
            1,
            0,
            1,
        )
        assert comm.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_new_communicator_is_logged_at_level_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "torchmn"), torchmn.create_communicator("solo") as comm:
        assert f"{comm.name}: 1 ranks on 1 hosts, over solo" in caplog.text


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(torchmn.ArgumentError, match=r"unknown communicator 'pure_ncll'. Did you mean 'pure_nccl'\?"):
        torchmn.create_communicator("pure_ncll")


def test_an_unknown_keyword_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match=r"unknown keyword 'time_out'. Did you mean 'timeout'\?") as caught:
        torchmn.create_communicator(time_out=3)
    assert isinstance(caught.value, torchmn.TorchMNError)


@pytest.mark.parametrize(
    "name", ["nccl", "pure_nccl", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_error_of_nccl_without_a_gpu_names_what_works(name: str) -> None:
    with pytest.raises(torchmn.ArgumentError, match=r"needs a GPU.*'mpi' under mpiexec or 'gloo' under torchrun"):
        torchmn.create_communicator(name)


def test_chainermns_cpu_names_mean_auto() -> None:
    assert create.NAMES["naive"] == create.NAMES["flat"] == "auto"


def test_threads_are_started_by_run_threads() -> None:
    with pytest.raises(torchmn.ArgumentError, match="run_threads"):
        torchmn.create_communicator("threads")


def test_the_error_of_gloo_without_a_launcher_names_launchers() -> None:
    with pytest.raises(torchmn.ArgumentError, match="torchrun"):
        torchmn.create_communicator("gloo")


@pytest.mark.parametrize("grad_dtype", [torch.int32, torch.float64, "float16"])
def test_a_grad_dtype_that_is_no_short_float_is_refused(grad_dtype: object) -> None:
    with pytest.raises(torchmn.ArgumentError, match="grad_dtype"):
        torchmn.create_communicator(grad_dtype=grad_dtype)


@pytest.mark.parametrize("timeout", [0, -1, "3", "off", True, math.nan])
def test_a_timeout_that_is_no_duration_is_refused(timeout: object) -> None:
    with pytest.raises(torchmn.ArgumentError, match="timeout"):
        torchmn.create_communicator(timeout=timeout)


def test_the_timeout_comes_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMN_TIMEOUT", "17")
    assert torchmn.create_communicator().settings.timeout == 17
    assert torchmn.create_communicator(timeout=5).settings.timeout == 5


@pytest.mark.parametrize("text", ["0", "-1", "nan", "never"])
def test_a_variable_that_is_no_duration_is_refused_with_the_way_to_wait_without_a_limit(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHMN_TIMEOUT", text)
    with pytest.raises(torchmn.ArgumentError, match=r"TORCHMN_TIMEOUT: expected seconds > 0.*TORCHMN_TIMEOUT=off"):
        torchmn.create_communicator()
    with pytest.raises(torchmn.ArgumentError, match="TORCHMN_TIMEOUT"):
        torchmn.run_threads(lambda comm: comm.barrier(), 2)


@pytest.mark.parametrize("text", ["off", "inf"])
def test_waits_without_a_limit_from_the_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHMN_TIMEOUT", text)
    year = 365 * 86400
    assert torchmn.create_communicator().settings.timeout >= year
    assert (
        torchmn.run_threads(lambda comm: comm.settings.timeout, 2)
        == [torchmn.create_communicator().settings.timeout] * 2
    )


def test_waits_without_a_limit_from_an_argument() -> None:
    year = 365 * 86400
    assert torchmn.create_communicator(timeout=math.inf).settings.timeout >= year
    assert min(torchmn.run_threads(lambda comm: comm.settings.timeout, 2, timeout=math.inf)) >= year
    with pytest.raises(torchmn.ArgumentError, match=r"run_threads: timeout: expected seconds > 0, got 0"):
        torchmn.run_threads(lambda comm: comm.barrier(), 2, timeout=0)


def test_processes_start_and_communicate_without_a_limit() -> None:
    """gloo's deadlines would overflow with infinity."""
    script = "import torch, torchmn; print(torchmn.create_communicator().allreduce(torch.ones(1)).item())"
    job = run_job(script, 2, "gloo", env={"TORCHMN_TIMEOUT": "off"})
    assert (job.returncode, job.stdout.split()) == (0, ["2.0", "2.0"]), job.output


def test_finalize_twice_is_fine_and_afterwards_operations_are_refused() -> None:
    comm = torchmn.create_communicator()
    comm.finalize()
    comm.finalize()
    with pytest.raises(torchmn.TorchMNError, match="finalized"):
        comm.allreduce(torch.ones(1))


def test_a_device_can_be_chosen() -> None:
    assert torchmn.create_communicator(device="cpu").device == torch.device("cpu")
