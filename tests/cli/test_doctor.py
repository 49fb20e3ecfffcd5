"""`torchmn doctor`: every check passes on a working machine, and gives advice on a broken one."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests._worlds.launch import ROOT, clean_environment
from tests.cli.commands import on, torchmn
from torchmn.cli.checks import hosts, machine, software
from torchmn.cli.checks.finding import fail, ok
from torchmn.cli.commands import doctor

MANUAL = ROOT / "docs" / "troubleshooting.md"
MPICH_LIBRARY = Path(sys.prefix) / "lib" / "libmpi.so.12"


def levels_by_check(report: str) -> dict[str, str]:
    """Returns the level of each check in a plain report, in order."""
    lines = [re.fullmatch(r"(ok|warn|FAIL) +(.+?)  +.*", line) for line in report.splitlines()]
    return {line[2]: line[1] for line in lines if line}


def headings(part: str) -> list[str]:
    """Returns the checks that a section of the manual explains."""
    text = MANUAL.read_text().partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    return re.findall(r"^### (.+)$", text, flags=re.MULTILINE)


@pytest.fixture
def clean(monkeypatch):
    """Removes the variables of launchers from this process."""
    for name in set(machine.os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


LONG = 400.0  # the whole command starts a dozen processes, six of which import torch


@pytest.mark.timeout(LONG + 20)
def test_every_check_passes_here_and_the_manual_explains_them_in_the_same_order():
    result = torchmn("doctor", timeout=LONG)
    levels = levels_by_check(result.out)
    assert "FAIL" not in levels.values(), result.out
    assert (result.status, result.err, result.survivors) == (0, "", [])
    assert list(levels) == headings("One host")
    for check in ("mpiexec fits mpi4py", "ranks over mpi", "torchmn over mpi", "torchmn over gloo"):
        assert levels[check] == "ok", result.out


@pytest.mark.timeout(LONG + 20)
def test_without_mpi_the_doctor_warns_and_gloo_works(python_without_mpi):
    result = torchmn("doctor", python=python_without_mpi, env={"PATH": "/usr/bin:/bin"}, timeout=LONG)
    levels = levels_by_check(result.out)
    assert levels["mpiexec"] == "warn" and "pip install mpich" in result.out
    assert "mpi4py" not in levels and "ranks over mpi" not in levels
    assert levels["torchmn over gloo"] == "ok", result.out
    assert result.status == 0


def test_the_library_beside_the_launcher_is_used(monkeypatch):
    _, env = on("openmpi")
    monkeypatch.setenv("TORCHMN_MPIEXEC", env["TORCHMN_MPIEXEC"])
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    mpi = software.MPI()
    findings = {finding.check: finding for finding in mpi.findings()}
    assert {finding.level for finding in findings.values()} == {"ok"}
    library = Path(env["TORCHMN_MPIEXEC"]).parent.parent / "lib" / "libmpi.so.40"
    assert str(library.resolve()) in findings["mpi4py"].found
    assert mpi.installation is not None and mpi.installation.flavour.name == "openmpi"


def test_a_launcher_and_a_library_that_do_not_fit_fail(monkeypatch):
    _, env = on("openmpi")
    if not MPICH_LIBRARY.exists():
        pytest.skip("MPICH's library is not in this environment")
    monkeypatch.setenv("TORCHMN_MPIEXEC", env["TORCHMN_MPIEXEC"])
    monkeypatch.setenv("MPI4PY_LIBMPI", str(MPICH_LIBRARY))
    mpi = software.MPI()
    *_, last = mpi.findings()
    assert (last.level, last.check) == ("FAIL", "mpiexec fits mpi4py")
    assert "Open MPI" in last.found and "MPICH" in last.found and "MPI4PY_LIBMPI" in last.advice
    assert mpi.installation is None


def test_a_library_that_cannot_be_loaded_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHMN_MPIEXEC", str(Path(sys.executable).parent / "mpiexec"))
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "libmpi.so.12"))
    *_, last = software.MPI().findings()
    assert (last.level, last.check) == ("FAIL", "mpi4py")
    assert "MPI4PY_LIBMPI" in last.advice


def test_a_second_copy_of_the_same_mpi_is_a_warning(monkeypatch, tmp_path):
    if not MPICH_LIBRARY.exists():
        pytest.skip("MPICH's library is not in this environment")
    copy = tmp_path / "libmpi.so.12"
    shutil.copy(MPICH_LIBRARY, copy)
    (tmp_path / "mpich").symlink_to(MPICH_LIBRARY.parent / "mpich")  # what the library itself needs
    monkeypatch.setenv("TORCHMN_MPIEXEC", str(Path(sys.executable).parent / "mpiexec"))
    monkeypatch.setenv("MPI4PY_LIBMPI", str(copy))
    *_, last = software.MPI().findings()
    assert (last.level, last.check) == ("warn", "mpiexec fits mpi4py")
    assert str(copy) in last.found


def test_a_program_that_is_not_a_launcher_is_a_warning(monkeypatch):
    monkeypatch.setenv("TORCHMN_MPIEXEC", "/bin/true")
    (only,) = software.MPI().findings()
    assert only.level == "warn" and "/bin/true" in only.found


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        ({"error": "ImportError: libc10.so"}, "FAIL", "libc10"),
        ({"version": "2.13", "gloo": False}, "warn", "without gloo"),
        ({"version": "2.13", "gloo": True}, "ok", "2.13"),
    ],
)
def test_torch(facts, level, words):
    finding = software.torch(facts)
    assert finding.level == level and words in finding.found


@pytest.mark.parametrize(
    ("facts", "level", "words"),
    [
        ({"gpus": [], "cuda": None, "nccl": False}, "ok", "none"),
        ({"gpus": [], "cuda": "13.0", "nccl": True}, "warn", "none visible"),
        ({"gpus": ["H100", "H100"], "cuda": "13.0", "nccl": True}, "ok", "2 (H100), CUDA 13.0, with nccl"),
        ({"gpus": ["H100"], "cuda": "13.0", "nccl": False}, "warn", "without nccl"),
        ({"error": "no torch"}, "ok", "none"),
    ],
)
def test_gpu(facts, level, words):
    finding = software.gpu(facts)
    assert finding.level == level and words in finding.found


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        ({}, "ok", "on one rank"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "warn", "rank 1 of 4"),
        ({"RANK": "0"}, "FAIL", "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "ok", "rank 0 of 1"),
    ],
)
def test_launcher_variables(environ, level, words):
    finding = machine.launcher_variables(environ)
    assert finding.level == level and words in finding.found


@pytest.mark.parametrize(
    ("threads", "level"), [(None, "ok"), ("1", "ok"), ("100000", "warn"), ("0", "warn"), ("many", "warn")]
)
def test_cores_and_threads(threads, level):
    finding = machine.cores_and_threads({"OMP_NUM_THREADS": threads} if threads else {})
    assert finding.level == level


def test_a_host_name_without_an_address_is_a_warning(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    finding = machine.host_name()
    assert finding.level == "warn" and "no-such-host.invalid" in finding.found and "/etc/hosts" in finding.advice


def test_a_host_name_with_a_foreign_address_is_a_warning(monkeypatch):
    elsewhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]  # an address for documentation
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere)
    finding = machine.host_name()
    assert finding.level == "warn" and "192.0.2.1" in finding.found


def test_missing_shared_memory_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "shm")
    finding = machine.shared_memory()
    assert finding.level == "FAIL" and str(tmp_path / "shm") in finding.found and "--shm-size" in finding.advice


def test_on_a_terminal_the_findings_are_a_table(capsys):
    findings = [ok("first", "node[1-2] is fine"), fail("second", "broken [bold]", "fix it")]
    assert doctor._show_table(iter(findings)) == findings
    text = capsys.readouterr().out
    for words in ("first", "node[1-2] is fine", "FAIL", "broken [bold]", "→ fix it"):
        assert words in text


# -- across hosts --------------------------------------------------------------------------------------------

# Replaces ssh: runs the command here. Host 127.0.0.9 denies access, 127.0.0.8 has another torch.
FAKE_SSH = f"""#!{sys.executable} -S
import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    words = words[2:] if words[0] == "-o" else words[1:]
host, *command = words
if host == "127.0.0.9":
    sys.exit("Permission denied (publickey).")
if host == "127.0.0.8" and "importlib" in " ".join(command):
    print('["3.11.7", "1.0", "4.1", "0.1"]')
    sys.exit()
os.execvp("sh", ["sh", "-c", " ".join(command)])
"""


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    path = tmp_path / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(FAKE_SSH)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")


def test_a_host_without_an_address_fails():
    finding = hosts.names(["localhost", "no-such-host.invalid"])
    assert finding.level == "FAIL" and "no-such-host.invalid" in finding.found


def test_a_host_that_asks_for_a_password_fails(fake_ssh):
    assert hosts.ssh(["127.0.0.2", "127.0.0.3"]).level == "ok"
    finding = hosts.ssh(["127.0.0.2", "127.0.0.9"])
    assert finding.level == "FAIL"
    assert "127.0.0.9: Permission denied" in finding.found and "ssh-copy-id 127.0.0.9" in finding.advice


def test_a_host_with_other_versions_fails(fake_ssh):
    assert hosts.same_software(["127.0.0.2", "127.0.0.3"]).level == "ok"
    finding = hosts.same_software(["127.0.0.2", "127.0.0.8"])
    assert finding.level == "FAIL" and "127.0.0.8: python 3.11.7, torch 1.0" in finding.found


def test_a_host_without_the_working_directory_is_named(fake_ssh, tmp_path, monkeypatch):
    directory = tmp_path / "only here"
    directory.mkdir()
    monkeypatch.chdir(directory)
    assert hosts.working_directory(["127.0.0.2"]).level == "ok"
    directory.rename(tmp_path / "moved")  # the fake host has the disks of this one
    monkeypatch.setattr(hosts.os, "getcwd", lambda: str(directory))
    finding = hosts.working_directory(["127.0.0.2", "127.0.0.3"])
    assert finding.level == "FAIL" and f"127.0.0.2 has no directory {directory}" in finding.found
    assert "mpiexec -wdir DIR" in finding.advice


CHECK_HOSTS = """
import sys
from torchmn.cli.checks import hosts, software
mpi = software.MPI()
list(mpi.findings())
for finding in hosts.across(sys.argv[1:], mpi.installation):
    print(f"{finding.level}  {finding.check}  {finding.found}")
"""


def test_ranks_reach_each_other_across_hosts(fake_ssh, clean):
    # Two addresses of this machine. In a subprocess, because the check kills its descendants.
    command = [sys.executable, "-c", CHECK_HOSTS, "127.0.0.2", "127.0.0.3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    levels = levels_by_check(result.stdout)
    assert list(levels) == headings("Across hosts")[: len(levels)], result.stdout + result.stderr
    assert levels.pop("one rank per host") == "warn"  # both are this machine
    assert levels.pop("speed across hosts") in ("ok", "warn")
    sound = [
        "names of hosts",
        "ssh",
        "same software",
        "working directory",
        "ranks across hosts",
        "the watchdog across hosts",
    ]
    assert levels == dict.fromkeys(sound, "ok")


def test_ranks_that_never_answer_are_killed_after_the_time_limit(clean):
    code = (
        "import sys\n"
        "from torchmn.cli.checks.probing import run_probe\n"
        "from torchmn.cli.launch.process_tree import descendants\n"
        "sleep = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'\n"
        "print(run_probe([sys.executable, '-c', sleep], {}, time_limit=0.5).problem, descendants())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert result.stdout == "no answer within 0.5 s: the ranks wait for each other []\n", result.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.write(1, b'{\"size\": 1}\\n' * 2)", "each is rank 0 of 1"),
        ("raise SystemExit('went wrong')", "exit status 1: went wrong"),
        ("print('nothing of use')", "nothing of use"),
    ],
)
def test_ranks_that_do_not_reach_each_other_are_reported(code, words, clean):
    script = (
        "import sys\n"
        "from torchmn.cli.checks.probing import run_probe\n"
        "print(run_probe([sys.executable, '-c', sys.argv[1]], {}).problem)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert words in result.stdout, result.stderr
