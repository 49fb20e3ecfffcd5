"""`torchmn run`: environment and arguments of ranks, whole lines of output, errors with advice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import every_transport, on, run, script, started, torchmn
from torchmn.cli.launch.job import rank_environment, usable_cores
from torchmn.communicators.launchers.environment import RUN_MARKER


@every_transport
def test_ranks_get_their_number_and_all_arguments_of_the_script(transport, tmp_path):
    path = script(
        tmp_path,
        """
        from torchmn.communicators.launchers.environment import detect
        place = detect()
        print("place", place.rank, place.size, place.local_rank, place.transport, sys.argv[1:])
        """,
    )
    arguments = ["--raw", "-n", "7", "--", "-m", ":", "", "two words", "it's", '"$HOME"', "*", "ünï"]
    result = run(transport, 3, path, *arguments)
    kind = "torch" if transport == "gloo" else "mpi"
    expected = [f"[{rank}] place {rank} 3 {rank} {kind} {arguments}" for rank in range(3)]
    assert sorted(result.out.splitlines()) == expected
    assert (result.status, result.err, result.survivors) == (0, "", [])


@every_transport
def test_ranks_reach_each_other(transport, tmp_path):
    path = script(
        tmp_path,
        """
        import torch, torchmn
        with torchmn.create_communicator() as comm:
            print("sum", comm.allreduce(torch.tensor([comm.rank + 1.0])).item(), "of", comm.size)
        """,
    )
    result = run(transport, 2, path)
    assert sorted(result.out.splitlines()) == ["[0] sum 3.0 of 2", "[1] sum 3.0 of 2"]
    assert (result.status, result.survivors) == (0, [])


# Data-parallel training as torch's documentation shows it, without TorchMN.
DDP_SCRIPT = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    x = torch.arange(12.0).reshape(6, 2)[dist.get_rank() :: dist.get_world_size()]
    model(x).mean().backward()
    print("gradient", model.module.weight.grad.round(decimals=3).tolist(), "local rank", os.environ["LOCAL_RANK"])
    dist.destroy_process_group()
    """


@pytest.mark.parametrize(("transport", "size"), [("mpich", 2), ("openmpi", 2), ("mpich", 3), ("gloo", 2)])
def test_an_unchanged_ddp_script_runs_on_every_transport(transport, size, tmp_path):
    result = run(transport, size, script(tmp_path, DDP_SCRIPT))
    assert sorted(result.out.splitlines()) == [
        f"[{rank}] gradient [[5.0, 6.0]] local rank {rank}" for rank in range(size)
    ], result.err


def test_an_unchanged_ddp_script_runs_on_one_rank(tmp_path):
    result = torchmn("run", "-n", "1", script(tmp_path, DDP_SCRIPT.replace("rank = ", "rank = 0  # ")))
    assert result.out == "gradient [[5.0, 6.0]] local rank 0\n", result.err


def test_a_module_runs_as_python_runs_it(tmp_path):
    package = tmp_path / "greeting"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "loud.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    with started("run", "-n", "2", "--transport", "gloo", "-m", "greeting.loud", "--volume", "11",
                 env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}) as command:  # fmt: skip
        result = command.end()
    assert sorted(result.out.splitlines()) == [f"[{rank}] __main__ greeting ['--volume', '11']" for rank in range(2)], (
        result.err
    )


@every_transport
def test_lines_of_any_length_stay_whole_and_in_order(transport, tmp_path):
    # Pieces that end anywhere, lines longer than a pipe holds, both streams at once.
    path = script(
        tmp_path,
        """
        lines = [f"{n}:" + chr(97 + rank) * (n * n % 9973) + ";" for n in range(400)]
        lines[200] = "200:" + chr(97 + rank) * 300_000 + ";"
        text = "".join(line + "\\n" for line in lines).encode()
        for begin in range(0, len(text), 4999):
            os.write(1, text[begin : begin + 4999])
            os.write(2, b"note\\n")
        os.write(1, b"no end of line")
        """,
    )
    result = run(transport, 3, path)
    by_rank: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for line in result.out.splitlines():
        match = re.fullmatch(r"\[(\d)\] (.*)", line)
        assert match, f"a torn line: {line[:80]}"
        by_rank[int(match[1])].append(match[2])
    for rank, lines in by_rank.items():
        letter = chr(97 + rank)
        expected = [f"{n}:{letter * (300_000 if n == 200 else n * n % 9973)};" for n in range(400)]
        assert lines == [*expected, "no end of line"]
    assert set(result.err.splitlines()) == {"[0] note", "[1] note", "[2] note"}


def test_a_progress_bar_leaves_one_line_in_a_file(tmp_path):
    path = script(
        tmp_path,
        """
        for step in range(1, 101):
            print(f"\\rstep {step}", end="", file=sys.stderr)
        print(file=sys.stderr)
        """,
    )
    result = run("gloo", 2, path)
    assert sorted(result.err.splitlines()) == ["[0] step 100", "[1] step 100"]


def test_raw_output_has_no_prefixes(tmp_path):
    path = script(tmp_path, 'print("from", rank)')
    result = run("gloo", 2, "--raw", path)
    assert sorted(result.out.splitlines()) == ["from 0", "from 1"]


@pytest.mark.parametrize("transport", ["mpich", "gloo"])
def test_ranks_read_an_empty_input(transport, tmp_path):
    path = script(tmp_path, "print(repr(sys.stdin.read()))")
    arguments, env = on(transport)
    with started("run", "-n", "2", *arguments, path, env=env, stdin=subprocess.PIPE) as command:
        result = command.end()  # our end of the pipe is still open: a rank that read it would wait
    assert sorted(result.out.splitlines()) == ["[0] ''", "[1] ''"]


def test_one_rank_runs_in_this_process_without_a_launcher(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys\n"
        "from torchmn.communicators.launchers.environment import detect\n"
        "print(input(), detect().name, os.environ['OMP_NUM_THREADS'])\n"
        "sys.exit(7)\n"
    )
    env = {"PMI_RANK": "3", "PMI_SIZE": "4", "OMP_NUM_THREADS": "5"}
    with started("run", "-n", "1", str(path), env=env, stdin=subprocess.PIPE) as command:
        command.process.communicate(b"typed\n", timeout=100)
        result = command.end()
    assert (result.status, result.out) == (7, "typed env 5\n")


@pytest.mark.parametrize(
    ("size", "threads", "environ", "expected"),
    [
        (1, None, {}, usable_cores()),
        (2, None, {}, max(1, usable_cores() // 2)),
        (1000, None, {}, 1),
        (2, None, {"OMP_NUM_THREADS": ""}, max(1, usable_cores() // 2)),
        (2, None, {"OMP_NUM_THREADS": "3"}, 3),
        (2, 5, {"OMP_NUM_THREADS": "3"}, 5),
    ],
)
def test_ranks_share_the_cores_unless_the_user_sets_threads(size, threads, environ, expected):
    assert rank_environment(size, threads, environ)["OMP_NUM_THREADS"] == str(expected)


def test_threads_of_the_command_line_reach_the_ranks(tmp_path):
    result = run("gloo", 2, "--threads", "2", script(tmp_path, "print(os.environ['OMP_NUM_THREADS'])"))
    assert sorted(result.out.splitlines()) == ["[0] 2", "[1] 2"]


# The shell of an allocation on two nodes, as launchers look for it, left in the middle of a step.
ALLOCATION = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOBID": "77",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
}


@every_transport
def test_ranks_start_on_this_machine_inside_a_slurm_allocation(transport, tmp_path):
    path = script(tmp_path, "print(rank, os.environ['SLURM_JOB_ID'])")
    result = run(transport, 2, path, env=ALLOCATION)
    assert sorted(result.out.splitlines()) == ["[0] 0 77", "[1] 1 77"], result.err
    assert result.status == 0


@pytest.mark.parametrize(("outer", "inner"), [("mpich", "gloo"), ("openmpi", "mpich"), ("gloo", "openmpi")])
def test_ranks_started_by_a_rank_use_the_inner_launcher(outer, inner, tmp_path):
    name = {"gloo": "torchmn"}.get(inner, inner)
    place = "from torchmn.communicators.launchers.environment import detect; print(detect().name, detect().rank)"
    arguments, env = on(inner)
    command = ["-m", "torchmn.cli.main", "run", "-n", "2", *arguments, script(tmp_path, place, "inner.py")]
    starts = f"""
        import subprocess
        environment = {{**os.environ, "TORCHMN_MPIEXEC": "", "MPI4PY_LIBMPI": "", **{env!r}}}
        sys.exit(subprocess.run([sys.executable, *{command!r}], env=environment).returncode if rank == 1 else 0)
        """
    result = run(outer, 2, script(tmp_path, starts, "outer.py"))
    assert sorted(result.out.splitlines()) == [f"[1] [0] {name} 0", f"[1] [1] {name} 1"], result.err
    assert result.status == 0


def test_without_mpi_ranks_use_gloo_with_a_message(python_without_mpi, tmp_path):
    path = script(tmp_path, f"print(os.environ[{RUN_MARKER!r}])")
    result = torchmn("run", "-n", "2", path, python=python_without_mpi, env={"PATH": "/usr/bin:/bin"})
    assert sorted(result.out.splitlines()) == ["[0] gloo", "[1] gloo"], result.err
    assert "using gloo, because" in result.err and "torchmn doctor" in result.err
    assert result.status == 0

    without_mpi = torchmn(
        "run", "-n", "2", "--transport", "mpi", path, python=python_without_mpi, env={"PATH": "/usr/bin:/bin"}
    )
    assert without_mpi.status == 2 and without_mpi.out == ""
    assert "mpiexec" in without_mpi.err and "--transport gloo" in without_mpi.err


def test_a_launcher_with_another_library_is_an_error(tmp_path):
    _, env = on("openmpi")
    library = Path(sys.prefix) / "lib" / "libmpi.so.12"
    if not library.exists():
        pytest.skip("MPICH's library is not in this environment")
    path = script(tmp_path, "print('never')")
    result = torchmn("run", "-n", "2", path, env={**env, "MPI4PY_LIBMPI": str(library)})
    assert result.status == 2 and result.out == ""
    for words in ("Open MPI", "MPICH", str(library.resolve()), "rank 0 of 1"):
        assert words in result.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["script.py"], ["number of ranks is missing", "-n"]),
        (["-n", "0", "script.py"], ["-n", "at least 1", "'0'"]),
        (["-n", "two", "script.py"], ["-n", "at least 1", "'two'"]),
        (["-n", "2"], ["script is missing"]),
        (["-n", "2", "-m"], ["script is missing"]),
        (["-n", "2", "scrpt.py"], ["'scrpt.py'", "Did you mean 'script.py'"]),
        (["-n", "2", "-m", "no_such_module.part"], ["'no_such_module'"]),
        (["-n", "2", "--transprt", "mpi", "script.py"], ["'--transprt'", "Did you mean '--transport'"]),
        (["-n", "2", "--transport", "glo", "script.py"], ["'glo'", "Did you mean 'gloo'"]),
        (["-n", "2", "--threads", "0", "script.py"], ["--threads", "at least 1"]),
        (["-n", "2", "--thr", "1", "script.py"], ["'--thr'", "Did you mean '--threads'"]),
    ],
)
def test_a_wrong_command_line_is_an_error_with_advice(arguments, words, tmp_path, monkeypatch, capsys):
    from torchmn.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("torchmn run: ")
    assert [word for word in words if word not in message] == []
