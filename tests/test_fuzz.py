"""Damaged files are read or refused by the documented error: tools/fuzz.py with few cases, and that it finds others."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests._worlds.launch import ROOT, clean_environment

pytestmark = pytest.mark.timeout(300)

PLANTED = """
import os
from tools import fuzz
from tools.fuzzing.subject import Subject
from torchmn.errors import DatasetError

def refuse(path):
    raise DatasetError(f"{path}: damaged")

def refuse_without_path(path):
    raise DatasetError("damaged")

def reserve(path):
    try:
        bytearray(600 << 20)
    except Exception as error:
        raise DatasetError(f"{path}: damaged") from error

def compute(path):
    fuzz.SECONDS = 0
    sum(range(1000))

def wait(path):
    os.read(os.pipe()[0], 1)

for read in (refuse, refuse_without_path, {}.pop, reserve, compute, lambda path: os._exit(7), wait):
    fuzz.PATIENCE = 1 if read is wait else 600
    subject = Subject("planted", "file", lambda draw: b"x", read, (DatasetError,), "data sets", False)
    tally = fuzz.run(subject, 1)
    print(*tally.outcomes, *tally.findings, sep=" | ")
"""


def output_of(*arguments: str) -> list[str]:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_damaged_files_of_every_reader_are_read_or_refused():
    lines = output_of("tools/fuzz.py", "--cases", "12")
    assert len(lines) > 20 and " refused" in lines[0]


def test_other_errors_time_memory_crashes_and_hangs_are_findings():
    lines = output_of("-c", PLANTED)
    assert [line.split(" | ")[0] for line in lines] == [
        "refused", "other errors", "other errors", "over 512 MB", "over 2 s", "lost or hung", "lost or hung",
    ]  # fmt: skip
    assert [line.partition(" | ")[2].partition(":")[0] for line in lines] == [
        "", "DatasetError without the path", "KeyError", "takes more than 512 MB", "takes more than 0 s",
        "ends the process with status 7", "does not end in 1 s",
    ]  # fmt: skip
