"""Environment variables for UCX are set while MPICH is loaded, and removed afterwards."""

from __future__ import annotations

import pytest

from torchmn.communicators.transports.mpi_library import small_unused_buffers


def test_ucx_variables_are_set_only_while_mpich_is_loaded() -> None:
    environ = {"PATH": "/bin"}
    with small_unused_buffers("mpich", environ):
        assert {name for name in environ if name != "PATH"} == {"UCX_MM_FIFO_SIZE", "UCX_MM_RX_BUFS_GROW"}
    assert environ == {"PATH": "/bin"}


def test_ucx_variables_are_removed_if_loading_fails() -> None:
    environ: dict[str, str] = {}
    with pytest.raises(ImportError), small_unused_buffers("mpich", environ):
        raise ImportError
    assert environ == {}


@pytest.mark.parametrize(
    ("launcher", "given"),
    [("openmpi", {}), ("intelmpi", {}), ("slurm", {}), ("mpich", {"UCX_TLS": "tcp"})],
)
def test_other_libraries_and_a_choice_of_the_user_are_left_alone(launcher: str, given: dict[str, str]) -> None:
    environ = dict(given)
    with small_unused_buffers(launcher, environ):
        assert environ == given
    assert environ == given
