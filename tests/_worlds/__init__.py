"""Worlds of ranks for tests.

    from tests._worlds import ranks

    @ranks(1, 2, 3)                      # threads, mpi and gloo at each size; solo too at size 1
    def test_every_rank_gets_the_sum(comm):
        ...                              # this body runs on every rank

    @ranks(3, on="mpi", timeout=20)      # one transport, or a list of them; seconds until the test is failed

Threads and solo run inside pytest. The others run in worker processes (pool.py starts them, worker.py is
what they run), kept from test to test because importing torch takes longer than most tests. `run_job` starts
a fresh job instead, for tests in which processes die.
"""

from tests._worlds.jobs import JobResult, run_job
from tests._worlds.marks import every_small_world, every_world, every_world_of_several, ranks

__all__ = ["JobResult", "every_small_world", "every_world", "every_world_of_several", "ranks", "run_job"]
