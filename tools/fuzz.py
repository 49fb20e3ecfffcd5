"""Reads damaged files with every reader of TorchMN: data sets, experiment files, checkpoints and weights.

    .venv/bin/python tools/fuzz.py                       all cases
    .venv/bin/python tools/fuzz.py --cases 100           the first 100 of each reader
    .venv/bin/python tools/fuzz.py --only npz --case 7   one case, with its traceback; the file is kept
    .venv/bin/python tools/fuzz.py --record              all cases, and their figures in docs/reliability.md

A case is a small valid file with changes (tools/fuzzing), which depend only on the name of the reader and the number of
the case. It is read in a worker process. A finding is another exception than the documented one or one that does not
name the file, more than 2 s of CPU time, more than 512 MB of memory, a read that does not end, and a worker that does.
Exit status 1 if there are findings.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from tools import reliability
from tools.fuzzing import checkpoints, data_files, documents
from tools.fuzzing.subject import Subject, emptied

SUBJECTS: tuple[Subject, ...] = (*data_files.SUBJECTS, *documents.SUBJECTS, *checkpoints.SUBJECTS)
CASES = {"data sets": 10_000, "images": 1_500, "YAML": 10_000, "checkpoints": 2_000, "weights": 2_000}
SECONDS, MEGABYTES = 2, 512
PATIENCE = 60
"""Seconds for a case, also while it waits for a processor or for ever."""
_PARENT_DEATH_SIGNAL = 1
READ, REFUSED, OTHER, SLOW, LARGE, LOST = "read", "refused", "other errors", "over 2 s", "over 512 MB", "lost or hung"


class Case(NamedTuple):
    """The outcome of a case, its CPU seconds, the memory that it took at most, and a description if it is a finding."""

    number: int
    outcome: str
    seconds: float = 0.0
    megabytes: float = 0.0
    finding: str = ""


@dataclass
class Tally:
    """The cases of a subject."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    megabytes: float = 0.0
    findings: dict[str, list[int]] = field(default_factory=dict)

    def add(self, case: Case) -> None:
        self.outcomes[case.outcome] += 1
        self.seconds, self.megabytes = max(self.seconds, case.seconds), max(self.megabytes, case.megabytes)
        if case.finding:
            self.findings.setdefault(case.finding, []).append(case.number)


def run(subject: Subject, count: int) -> Tally:
    """Returns the outcomes of the first `count` cases of a subject."""
    tally, begun = Tally(), 0
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where syncing takes no time
    with tempfile.TemporaryDirectory(prefix="torchmn-fuzz-", dir=memory) as folder:
        while begun < count:
            for case in _cases(subject, range(begun, count), Path(folder)):
                tally.add(case)
                begun = case.number + 1
    return tally


def _cases(subject: Subject, numbers: range, folder: Path) -> Iterator[Case]:
    """Yields the outcomes of cases from a worker process, the last one if it ends or has to be ended."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=_work, args=(subject, numbers, folder, sender))
    worker.start()
    sender.close()
    try:
        for number in numbers:
            if not receiver.poll(PATIENCE):
                yield Case(number, LOST, PATIENCE, finding=f"does not end in {PATIENCE} s")
                return
            try:
                case = receiver.recv()
                if isinstance(case, Exception):
                    raise RuntimeError(f"{subject.name}: case {number} cannot be made") from case
                yield case
            except EOFError:
                worker.join()
                yield Case(number, LOST, finding=f"ends the process with status {worker.exitcode}")
                return
    finally:
        worker.kill()
        worker.join()


def _work(subject: Subject, numbers: range, folder: Path, sender: Connection) -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)  # also if it waits for a file
    os.chdir(folder)  # which is searched for modules that files name
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)  # of libtiff
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for number in numbers:
        emptied(folder / "case")
        try:
            sender.send(outcome_of(subject, number, folder / "case"))
        except Exception as error:
            sender.send(error)
    os._exit(0)


def outcome_of(subject: Subject, number: int, folder: Path) -> Case:
    """Writes and reads a case in this process, whose address space is limited meanwhile."""
    path = subject.write(random.Random(f"{subject.name} {number}"), folder)
    before = _pages()
    limit = before.size + (MEGABYTES << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory
    begin = time.process_time()
    outcome, finding = READ, ""
    try:
        subject.read(path)
    except BaseException as error:
        outcome, finding = _judged(error, subject, folder)
    seconds = time.process_time() - begin
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    megabytes = max(_peak() - before.resident, 0) / (1 << 20)
    if outcome in (READ, REFUSED) and seconds > SECONDS:
        outcome, finding = SLOW, f"takes more than {SECONDS} s"
    return Case(number, outcome, seconds, megabytes, finding)


def _judged(error: BaseException, subject: Subject, folder: Path) -> tuple[str, str]:
    """Returns the outcome of an exception, and a description if it is a finding."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
            return LARGE, f"takes more than {MEGABYTES} MB: {_place(cause)}"
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if type(error) not in subject.errors:
        return OTHER, f"{type(error).__name__}: {_place(error)}"
    if subject.names_file and str(folder) not in str(error):
        return OTHER, f"{type(error).__name__} without the path: {_place(error)}"
    return REFUSED, ""


def _place(error: BaseException) -> str:
    """Returns where an exception was raised: the last line of TorchMN, and the last line."""
    frames = traceback.extract_tb(error.__traceback__) or [traceback.FrameSummary("?", 0, "?")]
    ours = [frame for frame in frames if "/torchmn/" in frame.filename] or frames
    places = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in (ours[-1], frames[-1]))
    return " and ".join(dict.fromkeys(places))


class _Pages(NamedTuple):
    size: int
    resident: int


def _pages() -> _Pages:
    """Returns the address space and the resident memory of this process in bytes."""
    size, resident = Path("/proc/self/statm").read_text().split()[:2]
    return _Pages(int(size) * resource.getpagesize(), int(resident) * resource.getpagesize())


def _peak() -> int:
    """Returns the peak of the resident memory in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def show(subject: Subject, number: int) -> None:
    """Writes a case to a folder that is kept, reads it, and prints what happens."""
    folder = Path(tempfile.mkdtemp(prefix="torchmn-fuzz-")) / "case"
    path = subject.write(random.Random(f"{subject.name} {number}"), folder)
    print(path)
    begin = time.process_time()
    try:
        subject.read(path)
    except BaseException:
        traceback.print_exc()
    print(f"{time.process_time() - begin:.2f} s")


TEXT = """\
`tools/fuzz.py` changes small valid files: bits, bytes and numbers are replaced, parts are dropped, doubled and mixed;
fields of headers announce huge or negative sizes, or none; archives have entries twice or nested, arrays have other
dtypes or Python objects; checksums are recomputed, so that the changes behind them are read; small files unpack to
300 MB; a pipe, a folder, a socket, a device or a link takes the place of a file. Every case is read as a user's program
does, in a process whose address space is limited.

A file is *read* or *refused*, by the documented error with its path. Everything else is a finding: another exception,
more than 2 s of CPU time, more than 512 MB, a process that crashes or does not end. Cases depend only on their
number."""


def record(name: str, tally: Tally) -> None:
    """Writes the figures of a subject into docs/reliability.md, in the place of its earlier ones."""
    columns = ["reader", "files", READ, REFUSED, OTHER, SLOW, LARGE, LOST, "longest (s)", "most memory (MB)"]
    figures = json.loads(reliability.FIGURES.read_text()) if reliability.FIGURES.exists() else {}
    rows = {row[0]: row for table in figures.get("fuzz", {}).get("tables", []) for row in table["rows"]}
    counts = [tally.outcomes[outcome] for outcome in columns[2:8]]
    rows[name] = [name, sum(counts), *counts, round(tally.seconds, 2), round(tally.megabytes)]
    ordered = [rows[subject.name] for subject in SUBJECTS if subject.name in rows]
    table = reliability.Table("", columns, ordered)
    reliability.record("fuzz", "Damaged files", TEXT, [table], "python tools/fuzz.py --record")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases; returns the exit status."""
    parser = argparse.ArgumentParser(description="Reads damaged files with every reader of TorchMN.")
    parser.add_argument("--only", default="", help="readers whose name matches this regular expression")
    parser.add_argument("--cases", type=int, help="number of cases of each reader")
    parser.add_argument("--case", type=int, help="show this case only")
    parser.add_argument("--record", action="store_true", help="write the figures into docs/reliability.md")
    options = parser.parse_args(arguments)
    tallies: dict[str, Tally] = {}
    for subject in SUBJECTS:
        if not re.search(options.only, subject.name):
            continue
        if options.case is not None:
            show(subject, options.case)
            continue
        begin = time.monotonic()
        tally = tallies[subject.name] = run(subject, options.cases or CASES[subject.section])
        counts = ", ".join(f"{count} {outcome}" for outcome, count in tally.outcomes.items())
        print(f"{subject.name}: {counts}; at most {tally.seconds:.2f} s and {tally.megabytes:.0f} MB "
              f"({time.monotonic() - begin:.0f} s)", flush=True)  # fmt: skip
        for finding, numbers in tally.findings.items():
            print(f"  {len(numbers)} x {finding}: case {', '.join(map(str, numbers[:5]))}", flush=True)
        if options.record:
            record(subject.name, tally)
    return 1 if any(tally.findings for tally in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
