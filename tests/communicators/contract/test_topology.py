"""intra and inter ranks: which ranks share a host."""

import pytest

import torchmn
from tests._worlds import every_world, ranks

HOSTS = [
    ["a"],
    ["a", "b"],
    ["a", "a", "b"],
    ["b", "a", "a"],
    ["z", "y", "x", "w"],
    ["a", "b", "a", "b"],
    ["b", "a", "b", "c", "b", "a"],
    ["a", "a", "a", "a", "b", "b", "c", "c", "c"],
]


def place(comm) -> tuple[int, int, int, int]:
    return comm.intra_rank, comm.intra_size, comm.inter_rank, comm.inter_size


def expected_place(hosts: list[str], rank: int) -> tuple[int, int, int, int]:
    """The contract, written out: hosts numbered by their smallest rank, ranks counted within their host."""
    smallest = {host: hosts.index(host) for host in hosts}
    numbered = sorted(smallest, key=lambda host: smallest[host])
    here = hosts[rank]
    return hosts[:rank].count(here), hosts.count(here), numbered.index(here), len(numbered)


@pytest.mark.parametrize("hosts", HOSTS, ids="".join)
def test_ranks_know_their_place_on_uneven_hosts(hosts):
    got = torchmn.run_threads(place, len(hosts), hosts=hosts)
    assert got == [expected_place(hosts, rank) for rank in range(len(hosts))]


@pytest.mark.parametrize("hosts", HOSTS, ids="".join)
def test_ranks_know_their_place_after_a_split(hosts):
    def body(comm):
        odd = comm.split(comm.rank % 2, -comm.rank)
        half = odd.split(odd.rank // 2)
        return odd.allgather_obj(comm.rank), place(odd), half.allgather_obj(comm.rank), place(half)

    for rank, (odd, in_odd, half, in_half) in enumerate(torchmn.run_threads(body, len(hosts), hosts=hosts)):
        assert in_odd == expected_place([hosts[member] for member in odd], odd.index(rank))
        assert in_half == expected_place([hosts[member] for member in half], half.index(rank))


def test_hosts_must_be_one_per_rank():
    for hosts in ([], ["a"], ["a", "b", "c"]):
        with pytest.raises(torchmn.ArgumentError, match="hosts"):
            torchmn.run_threads(place, 2, hosts=hosts)


@every_world
@ranks(3, on="openmpi")
def test_all_ranks_of_this_machine_share_one_host(comm):
    assert place(comm) == (comm.rank, comm.size, 0, 1)
    part = comm.split(comm.rank % 2, -comm.rank)
    assert place(part) == (part.rank, part.size, 0, 1)
