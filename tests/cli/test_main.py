"""The `torchmn` command itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torchmn
from tests.worlds.launch import ROOT
from torchmn.cli.main import COMMANDS, main


def ended(capsys, *arguments: str) -> tuple[int | str | None, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_version(capsys):
    assert ended(capsys, "--version") == (0, f"torchmn {torchmn.__version__}\n", "")


def test_help_names_every_command_and_each_has_its_own(capsys):
    status, text, _ = ended(capsys, "--help")
    assert status == 0
    for name, purpose in COMMANDS.items():
        assert f"  {name} " in text and purpose in text
        status, own, _ = ended(capsys, name, "--help")
        assert status == 0 and f"torchmn {name}" in own


def test_without_a_command_the_help_is_shown_and_the_status_is_that_of_an_error(capsys):
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
def test_an_unknown_name_is_answered_with_the_nearest(arguments, words, capsys):
    status, out, message = ended(capsys, *arguments)
    assert (status, out) == (2, "")
    assert [word for word in words if word not in message] == []


def test_of_the_ranks_of_a_job_only_the_first_says_what_is_wrong_with_the_command_line(capsys, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    for rank in (0, 1):
        monkeypatch.setenv("PMI_RANK", str(rank))
        status, out, message = ended(capsys, "train", "x.yaml", "--halopr")
        assert (status, out) == (2, "") and ("'--halopr'" in message) == (rank == 0)


def test_the_command_starts_without_loading_torch_or_mpi():
    code = (
        "import sys, torchmn.cli.main, torchmn.cli.run, torchmn.cli.doctor\n"
        "print(*{'torch', 'numpy', 'mpi4py', 'rich'} & set(sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "\n", "")
