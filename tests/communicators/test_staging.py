"""GPU tensors through host memory, with what a CPU allows: a transport that does not read "GPU" memory."""

from __future__ import annotations

import pytest
import torch

from torchmn.communicators.messages import staging
from torchmn.communicators.transports.mpi_library import reads_gpu_memory


@pytest.mark.parametrize(
    "x", [torch.arange(6.0).view(2, 3).t(), torch.tensor(3), torch.empty(0, 2, dtype=torch.bfloat16)]
)
def test_a_staged_tensor_is_a_contiguous_copy_in_host_memory(x: torch.Tensor) -> None:
    host = staging.to_host(x)
    assert torch.equal(host, x)
    assert host.is_contiguous() and host.is_cpu and host.dtype == x.dtype
    assert x.numel() == 0 or host.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("environment", "aware"),
    [
        ({}, False),
        ({"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        ({"MPICH_GPU_SUPPORT_ENABLED": "0"}, False),
        ({"TORCHMN_GPU_AWARE_MPI": "0", "MPICH_GPU_SUPPORT_ENABLED": "1"}, False),
        ({"TORCHMN_GPU_AWARE_MPI": "1"}, True),
    ],
)
def test_mpi_gets_gpu_memory_only_if_a_switch_is_set(environment: dict[str, str], aware: bool) -> None:
    assert reads_gpu_memory(environment) is aware
