"""Hosts: their names, the number of a rank among them, and groups of ranks for `split`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Machine(NamedTuple):
    """Where a process runs: the name of its host, and the random id of the boot of its kernel."""

    name: str
    boot: str

    @staticmethod
    def here() -> Machine:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:  # not on Linux: only the name
            boot = ""
        return Machine(socket.gethostname(), boot)


def names_of_hosts(machines: Sequence[Machine]) -> list[str]:
    """Returns the name of each rank's host, with a number appended if several machines have that name.

    Clones of a virtual machine may all be called `localhost`. Containers of one machine share its boot id: those with
    the same name count as one host.
    """
    boots: dict[str, list[str]] = {}
    for machine in machines:
        known = boots.setdefault(machine.name, [])
        if machine.boot not in known:
            known.append(machine.boot)
    return [name if len(boots[name]) == 1 else f"{name}#{boots[name].index(boot) + 1}" for name, boot in machines]


@dataclass(frozen=True)
class Topology:
    """One rank's numbers within its host and among hosts. Hosts are numbered by their smallest rank."""

    intra_rank: int
    intra_size: int
    inter_rank: int
    inter_size: int

    @staticmethod
    def of(hosts: Sequence[str], rank: int) -> Topology:
        """Returns the topology of `rank`, where rank i runs on `hosts[i]`. Hosts may have unequal numbers of ranks."""
        by_first_rank = list(dict.fromkeys(hosts))
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        return Topology(here.index(rank), len(here), by_first_rank.index(hosts[rank]), len(by_first_rank))


def groups(choices: Sequence[tuple[int | None, int]]) -> dict[int, list[int]]:
    """Returns the ranks of each color, ordered by key and then by rank, as MPI_Comm_split does.

    Args:
        choices: (color, key) of each rank; a rank whose color is None is in no group.
    """
    members: dict[int, list[int]] = {}
    for rank, (color, _) in enumerate(choices):
        if color is not None:
            members.setdefault(color, []).append(rank)
    for ranks in members.values():
        ranks.sort(key=lambda rank: (choices[rank][1], rank))
    return members
