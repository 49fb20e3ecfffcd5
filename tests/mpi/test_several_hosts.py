"""Jobs across hosts, made of namespaces: the numbers of one rank, the right topology, and no hang.

The hosts' own names lead to 127.0.1.1, as on a Debian: what depends on them must find another way.
"""

from __future__ import annotations

import pytest

from tests._worlds.hosts import Hosts, NoHosts
from tests._worlds.jobs import JobResult, run_job

VALUES = """
import sys, torch, torchmn
comm = torchmn.create_communicator()
right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
for length in (1, 30_000, 300_000, 3_000_000):  # messages of every kind; large ones go through shared memory on a host
    x = torch.arange(length, dtype=torch.float64) + comm.rank
    comm.send(x, right)
    assert torch.equal(comm.recv(left), x - comm.rank + left)
    expected = 3 * (x - comm.rank) + 3
    assert torch.equal(comm.allreduce(x), expected)
here = comm.split(comm.inter_rank, comm.rank)
together = here.allreduce(torch.full((300_000,), 1.0))
assert torch.equal(together, torch.full((300_000,), float(comm.intra_size)))

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(72, 3)).double()
images = torch.rand(2, 1, 6, 6, dtype=torch.float64)
grid = torchmn.ProcessGrid(comm, height=3)
model = torchmn.parallelize(net, grid, mode="halopar")
tiles = torchmn.data.scatter_regions((images, torch.zeros(2)), grid)
torch.testing.assert_close(model(torch.stack([tile for tile, _ in tiles])), net(images), rtol=1e-10, atol=1e-10)

place = (comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size)
places = comm.allgather_obj(place)
if comm.rank == 0:
    print("places", places, flush=True)
comm.barrier()
"""
RAISES = VALUES + "if comm.rank == 2: raise RuntimeError('the reason')\ncomm.barrier()"
LEAVES = VALUES + "if comm.rank != 2: comm.recv(2, tag=5)"
TWO_AND_ONE = [(0, 2, 0, 2), (1, 2, 0, 2), (0, 1, 1, 2)]
ONE_HOST = [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)]


def job(script: str, transport: str, called: str | None = None) -> JobResult:
    """A job of two ranks on one host, and a third on another."""
    try:
        with Hosts({"north": 2, "south": 1}, called) as hosts:
            result = run_job(script, 3, transport, hosts=hosts)
    except NoHosts as error:
        pytest.skip(str(error))
    assert not result.timed_out, result.output
    assert not result.survivors, f"left behind: {result.survivors}"
    return result


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_ranks_of_two_hosts_compute_as_one_and_an_exception_ends_them_all(transport: str) -> None:
    result = job(RAISES, transport)
    assert f"places {TWO_AND_ONE}" in result.output
    assert "rank 2 of 3 raised; the job is ended" in result.output
    assert result.output.count("RuntimeError: the reason") == 1
    assert result.returncode != 0


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_rank_that_leaves_is_reported_on_the_other_host_if_host_names_do_not_resolve(transport: str) -> None:
    result = job(LEAVES, transport)
    assert "rank 2 left" in result.output
    assert "has waited for" not in result.output
    assert "cannot reach" not in result.output
    assert result.returncode != 0


def test_containers_with_one_host_name_work_without_shared_memory_and_loopback() -> None:
    result = job(LEAVES, "mpi", called="box")
    assert f"places {ONE_HOST}" in result.output
    assert "rank 2 left" in result.output
    assert "cannot reach" not in result.output
