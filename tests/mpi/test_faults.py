"""A few of the faults of tools/faults.py; all of them are in docs/reliability.md."""

from __future__ import annotations

import pytest

from tools.fault_parts import endings

CASES = [
    ("mpiexec", "SIGKILL", "save"),
    ("torchmn run, gloo", "os._exit", "exit"),
]


@pytest.mark.parametrize(("launcher", "ending", "moment"), CASES)
def test_a_rank_that_ends_is_named_and_what_was_saved_loads(launcher: str, ending: str, moment: str) -> None:
    result = endings.run(endings.Job(launcher, ending, moment, 0))
    assert not result.hangs and result.named and result.status, result.output
    assert result.saved >= 2 and result.loaded == result.saved
    assert not result.left_behind
