"""Which ranks share a host: pure bookkeeping on host names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """One rank's place among the hosts of a communicator. Hosts are numbered by their smallest rank."""

    intra_rank: int
    intra_size: int
    inter_rank: int
    inter_size: int

    @staticmethod
    def of(hosts: Sequence[str], rank: int) -> Topology:
        """The place of `rank` where rank i runs on `hosts[i]`; hosts may hold different numbers of ranks."""
        by_first_rank = list(dict.fromkeys(hosts))
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        return Topology(here.index(rank), len(here), by_first_rank.index(hosts[rank]), len(by_first_rank))


def groups(choices: Sequence[tuple[int | None, int]]) -> dict[int, list[int]]:
    """The ranks of each color, ordered by key and then by rank, as MPI_Comm_split does.

    `choices[rank]` is that rank's (color, key); a color of None belongs to no group.
    """
    members: dict[int, list[int]] = {}
    for rank, (color, _) in enumerate(choices):
        if color is not None:
            members.setdefault(color, []).append(rank)
    for ranks in members.values():
        ranks.sort(key=lambda rank: (choices[rank][1], rank))
    return members
