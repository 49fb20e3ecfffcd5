"""Faults of many kinds at many moments: counts jobs that hang or give no reason, and checkpoints that are lost.

    .venv/bin/python tools/faults.py                                         everything; writes docs/reliability.md
    .venv/bin/python tools/faults.py endings --launchers mpirun --times 1    a part; writes no page
    .venv/bin/python tools/faults.py --page                                  writes the page from build/faults.jsonl

Each result is appended to that file. The attempts to join a job are skipped if it does not run as root.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import reliability  # noqa: E402
from tools.fault_parts import endings, joining, signals  # noqa: E402

ROWS = ROOT / "build" / "faults.jsonl"
PARTS = ("endings", "signals", "joining")
TEXT = """\
Jobs of two ranks, each a new one. A job hangs if it is still running after three minutes. It is silent if no line
names the rank and what happened to it.
"""
ENDINGS = """\
Rank 1 ends: by `os._exit(7)`, by a signal that it sends itself (SIGSEGV: by reading address 0), or by an exception.
Each does so while ranks create the communicator, in a loop of `allreduce`, in a loop of saves, and in an exit handler
that runs before or after TorchMN's; at a random moment of these. `TORCHMN_TIMEOUT` is {timeout} s for SIGSTOP and at
the start. An exception in an exit handler is printed with the rank, and does not change the status. A checkpoint is
counted when `wait` has returned, and loads if its values are those of its step. Seconds: from the end of rank 1 to that
of the job. torchrun waits for a process that is stopped after the script of its rank has ended.
"""
SIGNALS = f"""\
`torchmn train -n 2` gets SIGTERM up to {signals.LATEST:g} s after its first step, and again up to {signals.APART:g} s
later; half of the trainings in every process, as from Slurm, the others in the launcher only. A checkpoint is usable if
`--resume` continues from it, and the losses of all steps are those of a training that was not stopped.
"""
JOINING = """\
Jobs of `torchmn run`, in which rank 1 is held back before it connects. Meanwhile a process of the user `nobody`, which
has the path of the job's store and the ports of rank 0, tries to read the store, to connect to the watchdog's control
channel with a key of its own, and to be taken for rank 1 by gloo, with a pickled command to be run. Refused: it read
nothing, no command was run, and the job computed what it should, or ended with an error about the connection.
"""


def append(part: str, row: dict[str, Any], verdict: str, text: str) -> None:
    """Appends one result to the file, and prints it; with the output of the job if it is not as it should be."""
    ROWS.parent.mkdir(exist_ok=True)
    with ROWS.open("a") as file:
        file.write(json.dumps({"part": part, **row, "verdict": verdict}) + "\n")
    print(f"{verdict:8} {part} {text}", flush=True)
    if verdict != "ok":
        print(row["output"][-3000:], flush=True)


def run_endings(options: argparse.Namespace) -> None:
    jobs = endings.jobs(options.launchers, options.endings, options.moments, options.times)
    with ThreadPoolExecutor(options.at_once) as pool:
        for job, result in pool.map(lambda job: (job, endings.run(job)), jobs):
            problem = "HANGS" if result.hangs else "" if result.named else "SILENT"
            problem = problem or ("LOST" if result.loaded < result.saved else "ok")
            append("endings", job._asdict() | result._asdict(), problem, f"{job} {result.seconds} s: {result.named}")


def run_signals(options: argparse.Namespace) -> None:
    with ThreadPoolExecutor(options.at_once) as pool:
        results = list(pool.map(signals.run, range(10 * options.times)))
    expected = signals.uninterrupted(max(len(result.losses) for result in results))
    for result in results:
        problem = "HANGS" if result.hangs else "ok" if result.is_usable(expected) else "UNUSABLE"
        facts = f"{result.number} {result.transport} to_all={result.to_all} apart={result.apart:.2f} s"
        append("signals", result._asdict(), problem, f"{facts} status {result.status} {result.resumed}")


def run_joining(options: argparse.Namespace) -> None:
    if os.geteuid() != 0:
        print("skipped joining: only root can act as another user")
        return
    for number in range(4 * options.times):
        result = joining.run(number)
        facts = f"{number} {result.transport} {result.held} ports {result.ports} status {result.status}"
        append("joining", {"number": number} | result._asdict(), "ok" if result.refused else "JOINED", facts)


def write_page() -> None:
    """Writes the page from the last result of each case in the file."""
    rows: dict[str, dict[Any, dict[str, Any]]] = defaultdict(dict)
    for row in map(json.loads, ROWS.read_text().splitlines()):
        case = tuple(row.get(name) for name in ("launcher", "ending", "moment", "number"))
        rows[row["part"]][case] = row
    tables = [
        reliability.Table(text.strip(), columns, _counted(rows[part].values(), keys, counts))
        for part, text, columns, keys, counts in (
            (
                "endings",
                ENDINGS.format(timeout=endings.TIMEOUT),
                ("launcher", "ending", "jobs", "hang", "silent", "checkpoints", "that load", "most seconds"),
                ("launcher", "ending"),
                (
                    len,
                    lambda jobs: sum(job["hangs"] for job in jobs),
                    lambda jobs: sum(not job["named"] for job in jobs),
                    lambda jobs: sum(job["saved"] for job in jobs),
                    lambda jobs: sum(job["loaded"] for job in jobs),
                    lambda jobs: max(job["seconds"] for job in jobs),
                ),
            ),
            (
                "signals",
                SIGNALS,
                ("transport", "trainings", "hang", "usable checkpoints"),
                ("transport",),
                (len, lambda jobs: sum(job["hangs"] for job in jobs), _good),
            ),
            (
                "joining",
                JOINING,
                ("transport", "rank 1 connects by", "jobs", "refused", "job completed"),
                ("transport", "held"),
                (len, _good, lambda jobs: sum(job["completed"] for job in jobs)),
            ),
        )
        if rows[part]
    ]
    command = ".venv/bin/python tools/faults.py"
    reliability.record("faults", "Ranks that end, signals, and other users", TEXT, tables, command)


def _good(jobs: list[dict[str, Any]]) -> int:
    return sum(job["verdict"] == "ok" for job in jobs)


def _counted(
    jobs: Iterable[dict[str, Any]], keys: tuple[str, ...], counts: tuple[Callable[[list[dict[str, Any]]], Any], ...]
) -> list[list[Any]]:
    """Returns a row for each combination of values of `keys`, with the counts of its jobs."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for job in jobs:
        groups[tuple(job[key] for key in keys)].append(job)
    return [[*values, *(count(group) for count in counts)] for values, group in groups.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all, and the page")
    parser.add_argument("--launchers", nargs="+", choices=endings.LAUNCHERS, default=["mpiexec", "torchmn run, gloo"])
    parser.add_argument("--endings", nargs="+", choices=endings.ENDINGS, default=list(endings.ENDINGS))
    parser.add_argument("--moments", nargs="+", choices=endings.MOMENTS, default=list(endings.MOMENTS))
    parser.add_argument("--times", type=int, default=5, help="jobs of each kind; ten times as many trainings")
    parser.add_argument("--at-once", type=int, default=2, help="number of jobs that run at the same time")
    parser.add_argument("--page", action="store_true", help="only write the page, from the results of earlier runs")
    options = parser.parse_args()
    run = {"endings": run_endings, "signals": run_signals, "joining": run_joining}
    if not options.page:
        for part in options.parts or PARTS:
            run[part](options)
    if options.page or not options.parts:
        write_page()


if __name__ == "__main__":
    main()
