"""A process that starts warm behaves like any other, for itself and for the process that started it."""

import json
import signal

import psutil
import pytest

from tests._worlds import run_job
from tests._worlds.launch import Launch
from tests._worlds.warm_start.servers import IS_POSSIBLE, VARIABLE

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="processes do not start warm here")

COLD = {VARIABLE: "0"}

ACCOUNT = """
import sys
imported = sorted({"torch", "torch._dynamo"} & set(sys.modules))
import json, os, random, signal
import numpy, torch
streams = (sys.stdin, sys.stdout, sys.stderr)
places = (sys.path[0] == os.path.dirname(__file__), [place for place in sys.path[1:] if "warm_start" not in place])
umask = os.umask(0)
print(json.dumps({
    "arguments": [sys.argv[1:], os.path.basename(sys.argv[0]), os.path.basename(__file__), __name__],
    "place": [os.getcwd(), places, umask, sorted(os.sched_getaffinity(0))],
    "environment": {name: os.environ[name] for name in os.environ if not name.startswith(("TORCHMN", "PYTHONPATH"))},
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)],
    "files": sorted(int(file) for file in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{file}")),
    "streams": [[s.encoding, s.errors, s.line_buffering or s.write_through, s.name, s.fileno()] for s in streams],
    "threads": [torch.get_num_threads(), len(os.listdir("/proc/self/task"))],
    "main": sys.modules["__main__"].__dict__ is globals(),
    "imported": imported,
    "order": hash("a word"),
    "drawn": [random.random(), numpy.random.rand()],
}))
"""
OF_ITS_OWN = ("imported", "order", "drawn")


def account(env: dict[str, str], transport: str = "solo", n: int = 1) -> list[dict]:
    """Returns what the ranks of a job report about themselves."""
    job = run_job(ACCOUNT, n, transport, args=["-x", "two words", "ünï"], env=env)
    assert job.returncode == 0, job.output
    return [json.loads(line) for line in job.stdout.splitlines()]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_it_finds_what_a_process_from_nothing_finds_and_torch(unbuffered):
    setting = {"PYTHONUNBUFFERED": unbuffered}
    (warm,), (cold,) = account(setting), account(COLD | setting)
    assert warm["imported"] == ["torch", "torch._dynamo"] and cold["imported"] == []
    for name in set(cold) - set(OF_ITS_OWN):
        assert warm[name] == cold[name], name


def test_ranks_differ_as_processes_do():
    even, odd = account({}, "gloo", 2)
    assert even["order"] != odd["order"]
    assert not set(even["drawn"]) & set(odd["drawn"])
    assert account({})[0]["drawn"] not in (even["drawn"], odd["drawn"])


def test_a_setting_of_python_that_can_not_be_followed_starts_from_nothing():
    (report,) = account({"PYTHONHASHSEED": "1"})
    assert report["imported"] == []


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('on purpose')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
    ],
)
def test_it_ends_with_the_status_of_what_it_runs(ending, status):
    job = run_job(f"import os, signal, sys\nprint('last words')\n{ending}", 1, "solo", env={"PYTHONUNBUFFERED": "1"})
    assert job.returncode == status
    assert job.stdout == "last words\n"
    assert ("ValueError: on purpose" in job.stderr) == (status == 1)
    assert job.survivors == ()


def test_a_line_of_unbuffered_output_stays_whole():
    script = "import os\nprint('a line', end='')\nos.write(1, b'of another rank\\n')\nprint(' in pieces')"
    job = run_job(script, 1, "solo", env={"PYTHONUNBUFFERED": "1"})
    assert job.stdout == "of another rank\na line in pieces\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_process_that_was_started_ends_what_it_runs(signum, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import signal\nprint('up', flush=True)\nsignal.pause()")
    with (tmp_path / "output").open("wb") as output:
        launch = Launch("solo", 1, [str(script)], stdout=output)
        try:
            while "up" not in (tmp_path / "output").read_text():
                assert not launch.ended()
            assert len(launch.survivors()) == 2
            psutil.Process(launch.processes[0].pid).send_signal(signum)
            assert launch.wait(60)
            assert launch.returncode() == -signum
            assert launch.remain(10) == []
        finally:
            launch.kill()
