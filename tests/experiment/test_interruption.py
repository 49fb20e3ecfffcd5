"""Requests to stop a training: what is one request, what is a second, and what is nobody's business."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.worlds.launch import ROOT, clean_environment
from torchmn.experiment.interruption import SIGNALS, interruption


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of this process, as they were: the rest of a request may keep them."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", SIGNALS)
def test_signals_that_come_together_are_one_request(signum):
    with interruption() as stop:
        assert not stop()
        for _ in range(5):
            signal.raise_signal(signum)
        signal.raise_signal(signal.SIGTERM)
        assert stop() and stop.signum == signum
    signal.raise_signal(signum)  # the last of them may come when all is saved


# The program prints how far it came; `PAUSE` is how long two signals are one request.
PROGRAM = """
import signal, sys
from torchmn.experiment import interruption
interruption.ONE_REQUEST = float(sys.argv[1])
with interruption.interruption() as stop:
    for signum in sys.argv[2:]:
        signal.raise_signal(int(signum))
        sys.stdout.write(f"{stop()}\\n")
        sys.stdout.flush()
"""


def program(pause: float, *signals: int, **options) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, str(pause), *(str(int(signum)) for signum in signals)]
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, **options)
    return done.returncode, done.stdout


def test_a_second_request_ends_the_program():
    assert program(0.0, signal.SIGTERM, signal.SIGTERM) == (-signal.SIGTERM, "True\n")


def test_a_signal_that_the_program_was_started_to_ignore_stays_ignored():
    def as_nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    assert program(0.0, signal.SIGHUP, signal.SIGHUP, preexec_fn=as_nohup) == (0, "False\nFalse\n")


def test_a_handler_of_sigusr1_stays():
    heard = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    with interruption() as stop:
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] and not stop()


def test_handlers_are_given_back():
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with interruption():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(signum) for signum in SIGNALS] == before
