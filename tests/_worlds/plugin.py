"""What pytest calls: one item per world, sorted by world, each body run on all ranks of its world.

Two processes may share a session (`pytest -n 2 --dist loadscope`, of pytest-xdist): see `sharing`.
"""

from __future__ import annotations

import importlib
import os

import pytest

from tests._worlds.launch import NoLauncher
from tests._worlds.marks import DEFAULT_TIMEOUT, IN_THIS_PROCESS, TRANSPORTS, World, worlds_of
from tests._worlds.pool import RANK_TIMEOUT, START_SECONDS, Pools, Skipped, WorldFailed
from tests._worlds.warm_start.servers import VARIABLE, start_both
from tests._worlds.worker import Run
from tests.taken_away import WITHOUT

POOLS = pytest.StashKey[Pools]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes, on, timeout): run on every rank of worlds of these sizes")
    config.addinivalue_line("markers", "guard(name): a test of that guard, not run where guards are taken away")
    # The threads of `run_threads` live in this process, and a hang must end before pytest-timeout ends it.
    os.environ.setdefault("TORCHMN_TIMEOUT", RANK_TIMEOUT)
    config.stash[POOLS] = Pools()
    if config.getoption("numprocesses", None) and VARIABLE not in os.environ:
        start_both()  # once, before the processes of the session, which then share them


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = list(metafunc.definition.iter_markers("ranks"))
    if marks:
        worlds = sorted(worlds_of(marks), key=visiting_order)
        metafunc.parametrize("comm", worlds, ids=str, indirect=True)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> World:
    """This rank's communicator, as the body of a test marked `@ranks` sees it."""
    if not isinstance(getattr(request, "param", None), World):
        pytest.fail("a test that takes `comm` needs @ranks(...)")
    return request.param


@pytest.hookimpl(optionalhook=True)  # there may be no pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    from tests._worlds.sharing import ByWorld

    return ByWorld(config, log) if config.getvalue("dist") == "loadscope" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one world follow each other, so that each pool starts once; without guards, no test of a guard runs."""
    if any(name.endswith(".guards") for name in WITHOUT):
        of_guards = [item for item in items if item.get_closest_marker("guard")]
        items[:] = [item for item in items if item not in of_guards]
        config.hook.pytest_deselected(items=of_guards)
    items.sort(key=lambda item: visiting_order(world_of(item)))
    if hasattr(config, "workerinput"):
        from tests._worlds.sharing import turn_of

        items.sort(key=lambda item: turn_of(item.nodeid))
    for item in items:
        if world_of(item) is not None and item.get_closest_marker("timeout") is None:
            # A last resort behind our timeouts, whose reports are more detailed.
            item.add_marker(pytest.mark.timeout(START_SECONDS + 2 * timeout_of(item)))


def visiting_order(world: World | None) -> tuple[int, int]:
    """Where in a session a test of `world` runs; tests of no world come first."""
    if world is None:
        return -1, 0
    return TRANSPORTS.index(world.transport), world.size


def world_of(item: pytest.Item) -> World | None:
    callspec = getattr(item, "callspec", None)
    world = callspec.params.get("comm") if callspec is not None else None
    return world if isinstance(world, World) else None


def timeout_of(item: pytest.Item) -> float:
    return max((mark.kwargs["timeout"] for mark in item.iter_markers("ranks")), default=DEFAULT_TIMEOUT)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    world = world_of(pyfuncitem)
    if world is None:
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted if name != "comm"}
    if world.transport in IN_THIS_PROCESS:
        run_here(pyfuncitem.obj, world, arguments)
    else:
        run_in_pool(pyfuncitem, world, arguments)
    return True


def run_here(body, world: World, arguments: dict) -> None:
    # The first step of an optimizer imports it, 800 modules: not while other threads wait for this rank.
    importlib.import_module("torch._dynamo")
    import torchmn

    if world.transport == "solo":
        with torchmn.create_communicator("solo") as comm:
            body(comm=comm, **arguments)
    else:
        torchmn.run_threads(lambda comm: body(comm=comm, **arguments), world.size)


def run_in_pool(item: pytest.Function, world: World, arguments: dict) -> None:
    test = f"{item.cls.__qualname__}.{item.originalname}" if item.cls else item.originalname
    request = Run(item.obj.__module__, str(item.path), test, arguments)
    failure, reason = None, None
    try:
        item.config.stash[POOLS].run(world, request, timeout_of(item))
    except WorldFailed as error:
        failure = str(error)
    except (NoLauncher, Skipped) as error:
        reason = str(error)
    # Outside the handlers, or pytest would show our own exception beside the ranks' accounts.
    if failure is not None:
        pytest.fail(failure, pytrace=False)
    if reason is not None:
        pytest.skip(reason)


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[POOLS].stop()
