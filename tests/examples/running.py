"""Running an example as its users do: alone, under mpiexec, under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

from tests._worlds import JobResult, run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT = 150.0


def run_example(name: str, launcher: str, out: Path, *args: str) -> JobResult:
    """The result of `examples/NAME --quick`; `launcher`: alone, mpiexec or torchrun, the latter two with two ranks.

    It must end well, and show every line of its table once.
    """
    script, arguments = EXAMPLES / name, ["--quick", "--out", str(out), *args]
    if launcher == "torchrun":
        command = ["--standalone", "--nproc-per-node", "2", str(script), *arguments]
        result = run_job(f"from torch.distributed.run import main\nmain({command!r})", 1, "solo", timeout=TIMEOUT)
    else:
        n, transport = {"alone": (1, "solo"), "mpiexec": (2, "mpi")}[launcher]
        result = run_job(script, n, transport, args=arguments, timeout=TIMEOUT)
    assert result.returncode == 0, result.output
    assert result.survivors == ()
    assert f"{1 if launcher == 'alone' else 2} rank(s)" in result.stdout, result.output
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)), f"a line came twice:\n{result.stdout}"
    return result


def epochs(out: Path) -> dict[str, list]:
    """What the run logged, a column for each name, with a row for each epoch."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {name: [row[name] for row in rows] for name in rows[0]}
