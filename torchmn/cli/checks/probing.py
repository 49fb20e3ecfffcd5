"""Running the probe on ranks, with a time limit and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchmn.cli.checks.finding import Finding, fail, ok, warn
from torchmn.cli.launch.process_tree import adopt_orphans, kill_descendants
from torchmn.cli.start import START

PROBE = str(Path(__file__).with_name("probe.py"))
# Bytes per second, below which something is amiss.
SLOW_IN_A_MACHINE = 200e6
SLOW_IN_A_NETWORK = 80e6  # gigabit Ethernet gives 110e6
TIME_LIMIT = 120.0


@dataclass(frozen=True)
class Probed:
    """What the ranks answered, or why they did not."""

    answer: dict[str, Any] | None
    trouble: str
    warnings: str = ""


def probed(command: Sequence[str], environment: Mapping[str, str], time_limit: float = TIME_LIMIT) -> Probed:
    """The answer of the probe that `command` starts on several ranks."""
    adopt_orphans()
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(4)
        except subprocess.TimeoutExpired:
            pass
        return Probed(None, f"no answer within {time_limit:g} s: the ranks wait for each other")
    finally:
        kill_descendants([process.pid])
        process.wait()
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    if process.returncode or not answers:
        lines = [line for line in (err or out).strip().splitlines() if line.strip()]
        return Probed(None, f"exit status {process.returncode}: {lines[-1] if lines else 'and not a word'}")
    if len(answers) > 1 or answers[0]["size"] == 1:
        return Probed(None, f"{len(answers)} ranks answered, and each believes that it is alone")
    return Probed(answers[0], "", err)


def local_probe(transport: str, mode: str, size: int = 2) -> Probed:
    """The probe on ranks of this machine, started as a user would."""
    command = [sys.executable, START, "run", "--raw", "-n", str(size), "--transport", transport]
    return probed([*command, PROBE, mode], os.environ)


def speed(rung: str, answer: Mapping[str, Any], slow: float, advice: str) -> Finding:
    """Whether the ranks' messages were faster than `slow`."""
    speeds = {int(size): float(value) for size, value in answer["speeds"].items()}
    found = ", ".join(f"{size // 2**20} MB messages at {value / 1e6:.0f} MB/s" for size, value in speeds.items())
    return ok(rung, found) if max(speeds.values()) >= slow else warn(rung, found, advice)


def meeting(rung: str, result: Probed, size: int, advice: str) -> Finding:
    """Whether all `size` ranks met, and their numbers add up."""
    if result.answer is None:
        return fail(rung, result.trouble, advice)
    expected = size * (size + 1) // 2
    if (result.answer["size"], result.answer["sum"]) != (size, expected):
        return fail(rung, f"expected {size} ranks and the sum {expected}, got {result.answer}", advice)
    hosts = sorted(set(result.answer["hosts"]))
    return ok(rung, f"{size} ranks on {', '.join(hosts)} see each other, and their sum is right")


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
