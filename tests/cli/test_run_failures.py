"""`torchmn run` when ranks fail or the user ends them: the right exit status, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap

import pytest

from tests.cli.commands import FOREVER, TRANSPORTS, every_transport, on, run, running, script, started

# Rank 1 fails; the others would sleep forever.
FAILS = f"""
    if rank != 1:
        time.sleep({FOREVER})
    print("last words")
    %s
"""


EXITS = ("sys.exit(3)", 3)
IS_KILLED = ("os.kill(os.getpid(), signal.SIGKILL)", 137)
CRASHES = ("import ctypes; ctypes.string_at(0)", 139)


@pytest.mark.parametrize(
    ("transport", "ending", "status"),
    [(transport, *ending) for transport in TRANSPORTS for ending in (EXITS, IS_KILLED)] + [("mpich", *CRASHES)],
)
def test_the_first_failing_rank_ends_all_and_gives_its_status(transport, ending, status, tmp_path):
    result = run(transport, 3, script(tmp_path, FAILS % ending))
    assert (result.status, result.survivors) == (status, []), result.err
    assert "[1] last words" in result.out
    assert f"rank 1 {'failed' if status < 128 else 'was ended by SIG'}" in result.err
    assert f"exit status {status}" in result.err
    assert "mpiexec" not in result.err, "the launcher's banner is not shown"


@every_transport
def test_a_traceback_is_labelled_by_its_rank(transport, tmp_path):
    result = run(transport, 2, script(tmp_path, FAILS % "raise ValueError('on purpose')"))
    assert (result.status, result.survivors) == (1, [])
    assert "[1] Traceback (most recent call last):\n" in result.err
    assert "[1] ValueError: on purpose\n" in result.err


@pytest.mark.parametrize("transport", ["mpich", "openmpi"])
def test_mpi_abort_gives_its_status(transport, tmp_path):
    every_rank = "from mpi4py import MPI\n" + textwrap.dedent(FAILS)
    result = run(transport, 2, script(tmp_path, every_rank % "MPI.COMM_WORLD.Abort(5)"))
    assert (result.status, result.survivors) == (5, [])


@pytest.mark.parametrize("transport", ["mpich", "gloo"])
def test_later_failures_do_not_change_the_status(transport, tmp_path):
    path = script(
        tmp_path,
        f"""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        print("up")
        if rank == 2:
            sys.exit(7)
        time.sleep({FOREVER})
        """,
    )
    result = run(transport, 3, path)
    assert (result.status, result.survivors) == (7, [])


@every_transport
def test_a_rank_that_succeeds_does_not_end_the_others(transport, tmp_path):
    # Rank 1 continues only after the launcher has seen the end of rank 0: until then its file exists.
    path = script(
        tmp_path,
        f"""
        mine = {str(tmp_path)!r} + "/alive"
        if rank == 0:
            open(mine, "w").write(str(os.getpid()))
            sys.exit(0)
        while not os.path.exists(mine) or not (pid := open(mine).read()):
            time.sleep(0.01)
        while os.path.exists("/proc/" + pid):
            time.sleep(0.01)
        print("the last one")
        """,
    )
    result = run(transport, 2, path)
    assert (result.status, result.out) == (0, "[1] the last one\n")


INTERRUPTIBLE = f"""
    import subprocess
    # A process in a separate session that ignores signals: only its parents lead to it.
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({FOREVER})"
    subprocess.Popen([sys.executable, "-S", "-c", stubborn], start_new_session=True)
    %s
    try:
        print("up")
        time.sleep({FOREVER})
    finally:
        print("cleaned up")
"""


@every_transport
def test_ctrl_c_reaches_every_rank_and_leaves_no_process(transport, tmp_path):
    with running(transport, 3, script(tmp_path, INTERRUPTIBLE % "")) as command:
        command.until_printed("up", times=3)
        command.process.send_signal(signal.SIGINT)
        result = command.end()
    assert (result.status, result.survivors) == (130, [])
    assert sorted(line for line in result.out.splitlines() if "cleaned" in line) == [
        f"[{rank}] cleaned up" for rank in range(3)
    ]
    assert result.err.count("KeyboardInterrupt") == 3


@every_transport
def test_a_rank_may_clean_up_longer_than_another(transport, tmp_path):
    """mpiexec ends all ranks when one has failed, and a rank that Ctrl-C ended looks to it like one that failed."""
    path = script(
        tmp_path,
        f"""
        first = {str(tmp_path)!r} + "/first"
        if rank == 0:
            open(first, "w").write(str(os.getpid()))
        try:
            print("up")
            time.sleep({FOREVER})
        finally:
            if rank == 1:
                while os.path.exists("/proc/" + open(first).read()):
                    pass
                sum(range(10**7))
            print("cleaned up")
        """,
    )
    with running(transport, 2, path) as command:
        command.until_printed("up", times=2)
        command.process.send_signal(signal.SIGINT)
        result = command.end()
    assert (result.status, result.survivors) == (130, [])
    assert result.out.count("cleaned up") == 2, result.out + result.err


@pytest.mark.parametrize(
    ("transport", "signum"), [*((transport, signal.SIGTERM) for transport in TRANSPORTS), ("gloo", signal.SIGHUP)]
)
def test_signals_that_end_the_launcher_end_every_rank(transport, signum, tmp_path):
    with running(transport, 2, script(tmp_path, INTERRUPTIBLE % "")) as command:
        command.until_printed("up", times=2)
        command.process.send_signal(signum)
        result = command.end()
    assert (result.status, result.survivors) == (128 + signum, [])


IGNORE_SIGNALS = "for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)"


@every_transport
def test_ranks_that_ignore_signals_are_killed(transport, tmp_path):
    with running(transport, 2, script(tmp_path, INTERRUPTIBLE % IGNORE_SIGNALS)) as command:
        command.until_printed("up", times=2)
        command.process.send_signal(signal.SIGINT)
        result = command.end()
    assert (result.status, result.survivors) == (130, [])


@every_transport
def test_ranks_die_with_a_launcher_that_is_killed(transport, tmp_path):
    path = script(tmp_path, f"print('up')\ntime.sleep({FOREVER})")
    with running(transport, 2, path) as command:
        command.until_printed("up", times=2)
        command.process.kill()
        result = command.end(last_breath=20)
    assert (result.status, result.survivors) == (-signal.SIGKILL, [])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_wrapper_ends_the_job_too(victim, tmp_path):
    path = script(tmp_path, f"print('wrapper', os.getppid(), '.')\ntime.sleep({FOREVER})")
    with running("gloo", 2, path) as command:
        command.until_printed(" .", times=2)
        line = next(line for line in command.out.splitlines() if line.startswith(f"[{victim}]"))
        os.kill(int(line.split()[2]), signal.SIGKILL)
        result = command.end()
    assert (result.status, result.survivors) == (137, [])
    assert f"rank {victim} was ended by SIGKILL" in result.err


@pytest.mark.parametrize("transport", ["mpich", "gloo"])
def test_ranks_end_when_the_reader_of_their_output_exits(transport, tmp_path):
    arguments, env = on(transport)
    path = script(tmp_path, "while True: print('x' * 1000)")
    with started("run", "-n", "2", *arguments, path, env=env, stdout=subprocess.PIPE) as command:
        assert command.process.stdout is not None
        assert command.process.stdout.readline()
        command.process.stdout.close()
        status = command.process.wait(timeout=100)
        assert status == 128 + signal.SIGPIPE
        assert command.family() == []


# Ranks that have a thousand seconds to save, of which one waits for the other, which is gone.
PATIENT = """
import sys
from torchmn.cli.launch import supervisor
from torchmn.cli.launch.job import gloo_job, rank_environment
supervisor.REMAINING_SECONDS = 0.1
sys.exit(supervisor.supervise(gloo_job(2, [sys.executable, sys.argv[1]], rank_environment(2, 1)), patience=1000))
"""


def test_ranks_that_save_are_not_waited_for_when_another_rank_has_ended(tmp_path):
    source = f"if rank: signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('ready', flush=True)\ntime.sleep({FOREVER})"
    launcher = tmp_path / "patient.py"
    launcher.write_text(PATIENT)
    with started("run", "-n", "1", str(launcher), script(tmp_path, source)) as command:
        command.until_printed("ready", 2)
        command.process.send_signal(signal.SIGINT)
        result = command.end()
    assert (result.status, result.survivors) == (130, []), result.err


def test_ranks_that_end_while_they_map_their_memory_leave_no_file(tmp_path):
    path = script(
        tmp_path,
        f"""
        from torchmn.communicators.fastpath import shared_memory
        exchange = shared_memory.allgather_plain
        def killed(comm, path):
            with open({str(tmp_path / "created")!r}, "a") as file:
                file.write(path + chr(10))
            comm.Barrier()
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(comm, path)
        shared_memory.allgather_plain = killed
        import torchmn
        torchmn.create_communicator()
        """,
    )
    result = run("mpich", 2, path)
    assert "rank 1 was ended by SIGKILL" in result.err
    created = (tmp_path / "created").read_text().split()
    assert len(created) == 2 and not any(os.path.exists(file) for file in created)
