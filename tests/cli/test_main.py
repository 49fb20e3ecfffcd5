"""The `torchmn` command itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torchmn
from tests._worlds.launch import ROOT
from tests.cli.commands import COMMANDS, main, memory


def ended(capsys, *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_version(capsys):
    assert ended(capsys, "--version") == (0, f"torchmn {torchmn.__version__}\n", "")


def test_help_lists_every_command_and_each_command_has_help(capsys):
    status, text, _ = ended(capsys, "--help")
    assert status == 0
    for name, purpose in COMMANDS.items():
        assert f"  {name} " in text and purpose in text
        status, own, _ = ended(capsys, name, "--help")
        assert status == 0 and f"torchmn {name}" in own


def test_without_a_command_the_help_is_printed_and_the_status_is_2(capsys):
    assert main([]) == 2
    assert "torchmn COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu", "-n", "2", "x.py"], ["'rnu'", "Did you mean 'run'"]),
        (["docter"], ["'docter'", "Did you mean 'doctor'"]),
        (["--verison"], ["'--verison'", "Did you mean '--version'"]),
        (["doctor", "--host", "a"], ["'--host'", "Did you mean '--hosts'"]),
    ],
)
def test_an_unknown_name_raises_an_error_with_the_nearest(arguments, words, capsys):
    status, out, message = ended(capsys, *arguments)
    assert (status, out) == (2, "")
    assert [word for word in words if word not in message] == []


def test_errors_in_the_command_line_are_printed_by_rank_0_only(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("PMI_RANK", str(rank))
        status, out, message = ended(capsys, "train", "x.yaml", "--halopr")
        assert (status, out) == (2, "") and ("'--halopr'" in message) == (rank == 0)


def test_the_command_starts_without_loading_torch_or_mpi():
    code = (
        "import sys, torchmn.cli.main, torchmn.cli.commands.run, torchmn.cli.commands.doctor\n"
        "print(*{'torch', 'numpy', 'mpi4py', 'rich'} & set(sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "\n", "")


def test_more_ranks_than_fit_into_memory_are_an_error_unless_forced(tmp_path, monkeypatch, capsys):
    (tmp_path / "script.py").write_text("print(1)\n")
    (tmp_path / "shapes.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "free_memory", lambda: 1_300_000_000)
    for arguments in (("run", "-n", "200", "script.py"), ("train", "shapes.yaml", "-n", "200")):
        assert main(arguments) == 2
        printed = capsys.readouterr().err
        assert "need about 50.0 GB" in printed and "1.3 GB are free. Use at most -n 5, or --anyway" in printed
    memory.check_memory(5, anyway=False)
    memory.check_memory(200, anyway=True)


def test_a_container_may_have_less_memory_than_its_machine(tmp_path):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert memory.free_memory(info, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nactive_file 1000000\ninactive_file 2000000\n")
    assert memory.free_memory(info, tmp_path) == 4_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory(info, tmp_path) == 8000 * 1024
    assert memory.free_memory(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize("size", [1, 2])
def test_early_ctrl_c_ends_a_process_without_traceback_and_a_rank_with_its_job(size, monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchmn.cli.commands.new.main", interrupted)
    for name, value in {"WORLD_SIZE": size, "RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    if size == 1:
        assert main(["new", "x"]) == 130 and capsys.readouterr().err == ""
    else:
        with pytest.raises(KeyboardInterrupt):
            main(["new", "x"])
