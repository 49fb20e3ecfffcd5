"""`torchmn doctor`: a sequence of checks, each building on the previous ones, with advice where one fails."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from torchmn.cli.checks import hosts, machine, probing, slurm, software
from torchmn.cli.checks.finding import Finding
from torchmn.cli.parser import Parser
from torchmn.communicators.launchers import pmi
from torchmn.communicators.launchers.environment import detect
from torchmn.errors import DOCUMENTATION

GUIDE = f"{DOCUMENTATION}/troubleshooting.html"
STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; returns 0 if no check failed, otherwise 1."""
    options = command_parser().parse(arguments)
    if pmi.offered() and detect().rank != 0:  # `srun torchmn doctor`: one report is enough
        return 0
    names = [name for name in (options.hosts or "").split(",") if name]
    if options.json:
        found = list(findings(names))
        failed = any(finding.level == "FAIL" for finding in found)
        print(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in found]}, indent=2))
        return 1 if failed else 0
    show = _show_table if sys.stdout.isatty() else _show_lines
    levels = [finding.level for finding in show(findings(names))]
    failed, warned = levels.count("FAIL"), levels.count("warn")
    print(f"\n{len(levels)} checks: {failed} failed, {warned} with a warning. See\n{GUIDE}")
    return 1 if failed else 0


def command_parser() -> Parser:
    """Returns the parser of the command's options."""
    parser = Parser(
        "torchmn doctor",
        "Checks step by step that ranks can run on this machine, with advice for each problem found.\n"
        f"{GUIDE} explains each check.",
        "exit status: 0, or 1 if a check failed. A warning is not a failure.",
    )
    parser.usage = "torchmn doctor [--hosts A,B,...] [--json]"
    parser.add_argument(
        "--hosts", metavar="A,B,...", help="also check ranks across these hosts: names, ssh, versions, MPI"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def findings(hostnames: Sequence[str] = ()) -> Iterator[Finding]:
    """Runs the checks and yields their findings; those across hosts only if `hostnames` are given."""
    yield software.python()
    facts = software.torch_facts()
    yield software.torch(facts)
    yield machine.launcher_variables()
    yield machine.host_name()
    yield machine.cores_and_threads()
    yield machine.temporary_files()
    yield machine.shared_memory()
    mpi = software.MPI()
    yield from mpi.findings()
    if "error" not in facts:
        if mpi.installation:
            yield from probing.over_mpi()
        yield from probing.over_torchmn("gloo")
    yield from slurm.findings(mpi.loaded)
    yield software.gpu(facts)
    if hostnames:
        yield from hosts.across(hostnames, mpi.installation)


def _show_lines(findings: Iterable[Finding]) -> list[Finding]:
    """Prints each finding as a line as soon as it is available, and returns them all."""
    shown = []
    for finding in findings:
        print(f"{finding.level:<4}  {finding.check:<20}  {finding.found}", flush=True)
        if finding.advice:
            print(f"{'':<4}  {'':<20}  -> {finding.advice}", flush=True)
        shown.append(finding)
    return shown


def _show_table(findings: Iterable[Finding]) -> list[Finding]:
    """Shows the findings in a table that grows with them, and returns them all."""
    from rich.live import Live
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "finding and advice"):
        table.add_column(heading)
    shown = []
    with Live(table, vertical_overflow="visible"):
        for finding in findings:
            style = STYLES[finding.level]
            advice = f"\n[{style}]→ {escape(finding.advice)}[/]" if finding.advice else ""
            table.add_row(f"[{style}]{finding.level}[/]", finding.check, escape(finding.found) + advice)
            shown.append(finding)
    return shown
