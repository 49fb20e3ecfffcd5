"""Ranks share a host if its name is equal and, where several machines have that name, its boot id."""

from __future__ import annotations

from torchmn.communicators.launchers.topology import Machine, names_of_hosts


def test_a_name_of_one_machine_is_kept() -> None:
    assert names_of_hosts([Machine("a", "1"), Machine("b", "2"), Machine("a", "1")]) == ["a", "b", "a"]


def test_machines_of_one_name_are_numbered_in_the_order_of_their_ranks() -> None:
    machines = [Machine("localhost", "7"), Machine("localhost", "5"), Machine("b", "1"), Machine("localhost", "7")]
    assert names_of_hosts(machines) == ["localhost#1", "localhost#2", "b", "localhost#1"]
