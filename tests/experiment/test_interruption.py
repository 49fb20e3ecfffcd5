"""Requests to stop a training: what counts as one request or a second, and which signals are not handled."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from torchmn.experiment import interruption

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Run in a subprocess, which signals may end, and without torch. It prints its progress. Arguments: for how many
# seconds signals are one request, and the signals that it gets.
PROGRAM = """
import importlib.util, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
{before}
spec = importlib.util.spec_from_file_location("interruption", {path!r})
interruption = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interruption)
interruption.ONE_REQUEST = float(sys.argv[1])
signals = [int(signum) for signum in sys.argv[2:]]
handlers = [signal.getsignal(signum) for signum in signals]
with interruption.interruption() as stop:
    for signum in signals:
        signal.raise_signal(signum)
        print(stop.signum, flush=True)
if stop.is_recent:
    signal.raise_signal(signals[0])  # the last of them may come when all is saved
elif not stop():
    assert handlers == [signal.getsignal(signum) for signum in signals]
print("left", flush=True)
"""


def program(seconds: float, *signals: int, before: str = "") -> tuple[int, list[str]]:
    """The exit status of a program that gets these signals, and what it printed."""
    text = PROGRAM.format(before=before, path=interruption.__file__)
    command = [sys.executable, "-S", "-c", text, str(seconds), *(str(int(signum)) for signum in signals)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100)
    return done.returncode, done.stdout.split()


@pytest.mark.parametrize("signum", SIGNALS)
def test_signals_within_one_second_are_one_request(signum):
    signals = [signum, signum, signal.SIGTERM, signal.SIGINT]
    assert program(1000.0, *signals) == (0, [*[str(int(signum))] * len(signals), "left"])


def test_a_second_request_ends_the_program():
    assert program(0.0, signal.SIGTERM, signal.SIGTERM) == (-signal.SIGTERM, [str(int(signal.SIGTERM))])


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT])
def test_an_ignored_signal_stays_ignored(signum):
    ignore = f"signal.signal({int(signum)}, signal.SIG_IGN)"
    assert program(0.0, signum, signum, before=ignore) == (0, ["None", "None", "left"])


def test_an_existing_handler_of_sigusr1_is_kept():
    own = "signal.signal(signal.SIGUSR1, lambda *_: print('own', flush=True))"
    assert program(0.0, signal.SIGUSR1, before=own) == (0, ["own", "None", "left"])
