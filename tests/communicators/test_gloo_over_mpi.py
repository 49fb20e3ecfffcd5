"""create_communicator("gloo") under an MPI launcher: ranks agree on an address over MPI."""

import pytest

from tests._worlds import run_job

SCRIPT = """
import torch, torchmn
from mpi4py import MPI

world = torchmn.create_communicator("gloo")
assert world.traits.name == "gloo" and world.rank == MPI.COMM_WORLD.rank
assert world.allreduce(torch.tensor(world.rank + 1.0)).item() == world.size * (world.size + 1) / 2
second = torchmn.create_communicator("gloo")
assert second.allreduce_obj([second.rank]) == list(range(second.size))
part = torchmn.create_communicator("gloo", MPI.COMM_WORLD.Split(world.rank % 2, world.rank))
assert part.allreduce_obj([world.rank]) == [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
for name in ("pure_nccl", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware"):
    try:
        torchmn.create_communicator(name)
    except torchmn.ArgumentError as error:
        assert "needs a GPU that torch can see, and there is none" in str(error) or torch.cuda.is_available()
if world.rank == 1 and "fail" in __import__("sys").argv:
    raise ValueError("on purpose")
world.barrier()
print("passed", world.rank)
"""


@pytest.mark.parametrize("launcher", ["mpi", "openmpi"])
def test_ranks_of_gloo_find_each_other_over_mpi(launcher):
    job = run_job(SCRIPT, 3, launcher)
    assert job.returncode == 0, job.output
    assert job.survivors == ()
    assert sorted(line for line in job.stdout.splitlines() if line) == ["passed 0", "passed 1", "passed 2"]


def test_a_rank_that_raises_ends_the_job():
    job = run_job(SCRIPT, 2, "mpi", args=["fail"])
    assert job.returncode != 0 and job.survivors == ()
    assert "ValueError: on purpose" in job.output and "passed" not in job.stdout
