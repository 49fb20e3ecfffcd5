"""Rungs about ranks on this machine: do they meet over MPI and over gloo, and how fast are they?"""

from __future__ import annotations

from collections.abc import Iterator

from torchmn.cli.checks.finding import Finding
from torchmn.cli.checks.probing import SLOW_IN_A_MACHINE, local_probe, meeting, speed

LOOPBACK_ADVICE = "ranks of one machine should reach more: look at the cores and at shared memory above"


def over_mpi() -> Iterator[Finding]:
    """Two ranks with mpi4py alone; if they meet, two with our communicator, and their speed."""
    advice = "run `mpiexec -n 2 hostname`, then the same with `python -m mpi4py.bench helloworld`"
    met = meeting("ranks over mpi", local_probe("mpi", "mpi"), 2, advice)
    yield met
    if met.level == "ok":
        yield from _ours("mpi")


def over_gloo() -> Iterator[Finding]:
    """Two ranks with our communicator over gloo, and their speed."""
    yield from _ours("gloo")


def _ours(transport: str) -> Iterator[Finding]:
    result = local_probe(transport, "torchmn")
    advice = f"`torchmn run -n 2 --transport {transport}` with a script of two lines shows the whole message"
    yield meeting(f"torchmn over {transport}", result, 2, advice)
    if result.answer is not None:
        yield speed(f"speed over {transport}", result.answer, SLOW_IN_A_MACHINE, LOOPBACK_ADVICE)
