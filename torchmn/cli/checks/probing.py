"""Checks of communication between ranks: runs probe.py on them, with a time limit."""

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
# Bytes per second below which a warning is given.
SLOW_MACHINE = 200e6
SLOW_NETWORK = 80e6  # gigabit Ethernet reaches 110e6
TIME_LIMIT = 120.0


@dataclass(frozen=True)
class ProbeResult:
    """What rank 0 printed, or the problem, and the standard error of all ranks."""

    answer: dict[str, Any] | None
    problem: str
    warnings: str = ""


def run_probe(command: Sequence[str], environment: Mapping[str, str], time_limit: float = TIME_LIMIT) -> ProbeResult:
    """Runs the command, which starts the probe on several ranks, and kills all of its processes afterwards."""
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
        return ProbeResult(None, f"no answer within {time_limit:g} s: the ranks wait for each other")
    finally:
        kill_descendants([process.pid])
        process.wait()
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    if process.returncode or not answers:
        lines = [line for line in (err or out).strip().splitlines() if line.strip()]
        return ProbeResult(None, f"exit status {process.returncode}: {lines[-1] if lines else 'no output'}")
    if len(answers) > 1 or answers[0]["size"] == 1:
        return ProbeResult(None, f"{len(answers)} ranks answered, and each is rank 0 of 1")
    return ProbeResult(answers[0], "", err)


def local_probe(transport: str, mode: str, size: int = 2) -> ProbeResult:
    """Runs the probe on ranks of this machine, started by `torchmn run`."""
    command = [sys.executable, START, "run", "--raw", "-n", str(size), "--transport", transport]
    return run_probe([*command, PROBE, mode], os.environ)


def speed_finding(check: str, answer: Mapping[str, Any], slow: float, advice: str) -> Finding:
    """Returns the finding about the speed of messages, a warning if it is below `slow`."""
    speeds = {int(size): float(value) for size, value in answer["speeds"].items()}
    found = ", ".join(f"{size // 2**20} MB messages at {value / 1e6:.0f} MB/s" for size, value in speeds.items())
    return ok(check, found) if max(speeds.values()) >= slow else warn(check, found, advice)


def rank_finding(check: str, result: ProbeResult, size: int, advice: str) -> Finding:
    """Returns the finding whether all `size` ranks reached each other, and their sum is correct."""
    if result.answer is None:
        return fail(check, result.problem, advice)
    expected = size * (size + 1) // 2
    if (result.answer["size"], result.answer["sum"]) != (size, expected):
        return fail(check, f"expected {size} ranks and the sum {expected}, got {result.answer}", advice)
    hosts = sorted(set(result.answer["hosts"]))
    return ok(check, f"{size} ranks on {', '.join(hosts)} reach each other, and their sum is correct")


def over_mpi() -> Iterator[Finding]:
    """Checks two ranks with mpi4py only and, if they reach each other, two with TorchMN's communicator."""
    advice = "run `mpiexec -n 2 hostname`, then the same with `python -m mpi4py.bench helloworld`"
    finding = rank_finding("ranks over mpi", local_probe("mpi", "mpi"), 2, advice)
    yield finding
    if finding.level == "ok":
        yield from over_torchmn("mpi")


def over_torchmn(transport: str) -> Iterator[Finding]:
    """Checks two ranks with TorchMN's communicator, and their speed."""
    result = local_probe(transport, "torchmn")
    advice = f"run a script of two lines with `torchmn run -n 2 --transport {transport}` for the whole error"
    yield rank_finding(f"torchmn over {transport}", result, 2, advice)
    if result.answer is not None:
        advice = "ranks of one machine should be faster: see the cores and the shared memory above"
        yield speed_finding(f"speed over {transport}", result.answer, SLOW_MACHINE, advice)
