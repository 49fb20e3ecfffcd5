"""How two processes share a session (pytest-xdist): which tests stay together in one of them.

One process runs all tests that start jobs, beside it the other one those that stay in their process, module by
module. The pools come last, in one of them: ranks that wait for a message keep a core busy, and tests beside them
would gain nothing.

By a scheduler of our own, since xdist's `loadgroup` writes its groups into node ids, and pytest 9.2 does not read them.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

from tests._worlds.marks import IN_THIS_PROCESS, TRANSPORTS

# Tests that start new jobs.
_JOBS = ("tests/cli/", "tests/docs/", "tests/examples/", "tests/mpi/", "tests/_worlds/", "tests/test_readme.py/")
_POOLED = "|".join(transport for transport in TRANSPORTS if transport not in IN_THIS_PROCESS)
_WORLD_WITH_A_POOL = re.compile(rf"[\[-](?:{_POOLED})-\d+[\]-]")


def group_of(nodeid: str) -> str:
    """The tests that stay in one process with this one: "pools", "jobs", or those of its module."""
    module, _, test = nodeid.partition("::")
    if f"{module}/".startswith(_JOBS):
        return "jobs"
    return "pools" if _WORLD_WITH_A_POOL.search(test) else module


def turn_of(nodeid: str) -> int:
    """When the group of this test begins: jobs first, because all of them take the longest, and pools last."""
    return {"jobs": 0, "pools": 2}.get(group_of(nodeid), 1)


class ByWorld(LoadScopeScheduling):
    """Gives the groups to the processes, whole."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
