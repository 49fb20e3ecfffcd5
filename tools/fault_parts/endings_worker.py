"""A rank of a job in which rank 1 ends at a chosen moment: started by tools/faults.py.

    python faults_worker.py ENDING MOMENT DELAY EARLY DIRECTORY

Saves checkpoints in DIRECTORY, with a line in its file `saved` for each that is complete.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

ENDING, MOMENT, DELAY, EARLY, DIRECTORY = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
RANK = int(next(os.environ[name] for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if name in os.environ))


def end(*_: object) -> None:
    (DIRECTORY / "ended").write_text(str(time.time()))
    if ENDING == "exception":
        raise RuntimeError("the reason")
    if ENDING == "os._exit":
        os._exit(7)
    if ENDING == "SIGSEGV":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.Signals[ENDING])


def end_later() -> None:
    """Ends rank 1 after DELAY seconds, wherever it is then: by another thread, or by an exception in the main one."""
    if RANK != 1:
        return
    if ENDING == "exception":
        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, DELAY)
    else:
        threading.Timer(DELAY, end).start()


def exit_handler() -> None:
    if RANK == 1:
        end()


if MOMENT == "exit" and EARLY == "1":  # called after TorchMN's
    atexit.register(exit_handler)

import torch  # noqa: E402

import torchmn  # noqa: E402

create_communicator = torchmn.create_communicator  # imports what it needs
if MOMENT == "start" and RANK == 1:
    while not (DIRECTORY / "waits").exists():
        time.sleep(0.01)
    time.sleep(1)  # until rank 0 waits
    if EARLY == "1":
        end()
    end_later()
(DIRECTORY / "waits").touch()
comm = create_communicator()
if MOMENT == "exit" and EARLY == "0":  # called before TorchMN's
    atexit.register(exit_handler)

model = torch.nn.Linear(200, 200)
checkpointer = torchmn.create_multi_node_checkpointer("faults", comm, DIRECTORY, keep=None)


def save(step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    checkpointer.save(step, extra=torch.full((50_000,), float(comm.rank)), model=model)
    checkpointer.wait()
    if comm.rank == 0:
        with (DIRECTORY / "saved").open("a") as file:
            file.write(f"{step}\n")


for step in range(2):
    save(step)
if MOMENT in ("collective", "save"):
    end_later()
if MOMENT == "save":
    for step in range(2, 10_000):
        save(step)
while MOMENT != "exit":
    comm.allreduce(model.weight)
