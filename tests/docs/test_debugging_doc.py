"""docs/debugging.md: blocks run as printed, the table is that of the run, and a breakpoint stops one rank."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, assert_contents_are_the_sections, page, run_snippets, snippets

PAGE = page("debugging.md")


@pytest.mark.parametrize(("n", "transport"), [(1, "solo"), (2, "mpi")])
def test_every_block_runs_as_printed(n, transport, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    job = run_snippets(PAGE, n, transport, tmp_path)
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    assert len(rows(shown)) == 2
    assert rows(job.stdout) == sorted(n * rows(shown))
    assert "deadlock: " in shown and job.stdout.count("deadlock: ") == n
    traces = [(tmp_path / f"trace-{rank}.json").read_text() for rank in range(n)]
    ranges = re.findall(r"^\| (.*?) \| .* \|$", PAGE.partition("| range |")[2], re.MULTILINE)
    names = re.findall(r"`([^`]+)`", " ".join(ranges))
    assert len(names) > 8
    recorded = {"torchmn::agreement", "torchmn::halo_exchange"}
    recorded |= {"torchmn::optimizer step", "torchmn::gradient mean", "Optimizer.step#SGD.step"}
    assert recorded <= set(names)
    for trace in traces:
        assert [name for name in recorded if n > 1 and f'"{name}"' not in trace] == []


def rows(text: str) -> list[tuple[str, ...]]:
    """Rank, operation, peer and function of each row of the watchdog's table; the rank that reports may be any."""
    return sorted(re.findall(r"^  (\d)     localhost +(\w+) +(rank \d) +.* in (\w+)$", text, re.MULTILINE))


def test_a_breakpoint_stops_one_rank_and_the_others_wait(tmp_path):
    ranks_as_threads, inspected = snippets(PAGE)[:2]
    script = tmp_path / "debug.py"
    script.write_text(ranks_as_threads + inspected + "\nprint('continued')\n")
    run = subprocess.run(
        [sys.executable, str(script)],
        input="p shard.tolist()\ncontinue\n",
        capture_output=True,
        text=True,
        timeout=100,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "TORCHMN_TIMEOUT": "off"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "[1.0, 2.0, 3.0]" in run.stdout
    assert run.stdout.endswith("continued\n")


def test_contents_are_the_sections():
    assert_contents_are_the_sections(PAGE)
