"""The hooks of pytest that run a test with `@ranks` on its ranks.

Every pytest where TorchMN is installed loads this file. It does not import torch before a test needs it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import torchmn
from torchmn.testing.worlds import MARK, TestedRanks, worlds_of

_INSIDE = "TORCHMN_TESTING_RANK"
"""Set in a process that is a rank of the test that it runs."""
_START_SECONDS = 120.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(worlds): run on every rank; set by torchmn.testing.ranks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    worlds = list(worlds_of(metafunc.definition.iter_markers(MARK)))
    if not worlds:
        return
    if "comm" not in metafunc.fixturenames:
        pytest.fail(f"{metafunc.definition.nodeid}: expected a test with @ranks to have an argument `comm`", False)
    metafunc.parametrize("comm", worlds, ids=str)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker(MARK) is None:
        return None
    tested = pyfuncitem.funcargs["comm"]
    assert isinstance(tested, TestedRanks)
    names = pyfuncitem.fixturenames
    arguments = {name: pyfuncitem.funcargs[name] for name in _parameters(pyfuncitem, names) if name != "comm"}
    if _INSIDE in os.environ:
        _run_on_this_rank(pyfuncitem.obj, arguments)
    elif tested.transport == "threads":
        _run_on_threads(pyfuncitem.obj, tested, arguments)
    else:
        _run_in_processes(pyfuncitem, tested)
    return True


def _parameters(item: pytest.Function, fixtures: list[str]) -> list[str]:
    """Returns the fixtures that are parameters of the test itself."""
    code = getattr(item.obj, "__func__", item.obj).__code__
    taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in fixtures if name in taken]


def _run_on_threads(test: Any, tested: TestedRanks, arguments: dict[str, Any]) -> None:
    torchmn.run_threads(lambda comm: test(comm=comm, **arguments), tested.size, timeout=tested.timeout)


def _run_on_this_rank(test: Any, arguments: dict[str, Any]) -> None:
    with torchmn.create_communicator() as comm:
        test(comm=comm, **arguments)


def _run_in_processes(item: pytest.Function, tested: TestedRanks) -> None:
    """Runs the test in a job of its ranks, each of which is pytest with this test only."""
    start = "import sys; from torchmn.cli.main import main; sys.exit(main())"
    job = ["run", "-n", str(tested.size), "--transport", tested.transport]
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", str(item.config.rootpath)]
    if item.config.inipath is not None:
        options += ["-c", str(item.config.inipath)]
    command = [sys.executable, "-c", start, *job, "-m", "pytest", *options, item.nodeid]
    environment = {**os.environ, _INSIDE: "1", "TORCHMN_TIMEOUT": str(tested.timeout), "PYTEST_ADDOPTS": ""}
    try:
        done = subprocess.run(
            command,
            cwd=item.config.rootpath,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=tested.timeout + _START_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout
        pytest.fail(f"{tested}: the ranks did not end within {error.timeout:g} seconds\n{output or ''}", pytrace=False)
    if done.returncode:
        pytest.fail(f"{tested}: exit status {done.returncode}\n{done.stdout}", pytrace=False)
    if "1 skipped" in done.stdout:
        pytest.skip(f"{tested}: skipped by its ranks")
