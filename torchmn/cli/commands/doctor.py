"""`torchmn doctor`: a ladder of checks, each on the one before, and what to do where one does not hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from torchmn.cli.checks import hosts, machine, probing, software
from torchmn.cli.checks.finding import Finding
from torchmn.cli.parser import Parser

STYLES = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}


def main(arguments: Sequence[str]) -> int:
    """0 where ranks will work, 1 where something must be mended first."""
    options = _parser().parse(arguments)
    names = [name for name in (options.hosts or "").split(",") if name]
    show = _show_table if sys.stdout.isatty() else _show_lines
    levels = [finding.level for finding in show(ladder(names))]
    failed, warned = levels.count("FAIL"), levels.count("warn")
    print(f"\n{len(levels)} checks: {failed} failed, {warned} with a warning. More: docs/troubleshooting.md")
    return 1 if failed else 0


def _parser() -> Parser:
    parser = Parser(
        "torchmn doctor",
        "Checks, step by step, what ranks need on this machine, and says what to do where something is amiss.\n"
        "docs/troubleshooting.md walks the same steps.",
        "exit status: 0, or 1 where a check failed. A warning is no failure.",
    )
    parser.usage = "torchmn doctor [--hosts A,B,...]"
    parser.add_argument(
        "--hosts", metavar="A,B,...", help="also check ranks across these hosts: names, ssh, software, MPI"
    )
    return parser


def ladder(names: Sequence[str] = ()) -> Iterator[Finding]:
    """The findings, from the ground upwards; those across hosts only where hosts are named."""
    yield software.python()
    facts = software.torch_facts()
    yield software.torch(facts)
    yield machine.launcher_variables()
    yield machine.host_name()
    yield machine.cores_and_threads()
    yield machine.temporary_files()
    yield machine.shared_memory()
    mpi = software.MPI()
    yield from mpi.climb()
    if "error" not in facts:
        if mpi.installation:
            yield from probing.over_mpi()
        yield from probing.over_gloo()
    yield software.gpu(facts)
    if names:
        yield from hosts.across(names, mpi.installation)


def _show_lines(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, after each was printed as a line when it was known."""
    shown = []
    for finding in findings:
        print(f"{finding.level:<4}  {finding.rung:<20}  {finding.found}", flush=True)
        if finding.advice:
            print(f"{'':<4}  {'':<20}  -> {finding.advice}", flush=True)
        shown.append(finding)
    return shown


def _show_table(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, after they were shown in a table that grew with them."""
    from rich.live import Live
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "check", "found, and what to do"):
        table.add_column(heading)
    shown = []
    with Live(table, vertical_overflow="visible"):
        for finding in findings:
            style = STYLES[finding.level]
            advice = f"\n[{style}]→ {escape(finding.advice)}[/]" if finding.advice else ""
            table.add_row(f"[{style}]{finding.level}[/]", finding.rung, escape(finding.found) + advice)
            shown.append(finding)
    return shown
