"""What all ranks must find alike: each reads the file and the data by itself, maybe on a disk of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.datasets import Arrays
from torchmn.errors import ExperimentError
from torchmn.experiment.run.run_directory import difference

Result = TypeVar("Result")
MOST_ROWS = 64
"""How many samples of a data set are compared: all of it would have to be read."""


def on_rank_0(comm: Communicator, what: str, work: Callable[[], Result]) -> Result:
    """What `work()` returns on rank 0, on every rank; what it raises there is an ExperimentError on every rank."""
    return comm.attempt(what, work, root=0, raises=ExperimentError)[0]


def on_every_rank(
    comm: Communicator, what: str, work: Callable[[], Result], looks_like: Callable[[Result], Any]
) -> Result:
    """What `work()` returns here; an ExperimentError on all ranks, if it fails on one or they do not get the same.

    what: its name for messages. looks_like: plain values that tell one result from another.
    """
    if comm.size == 1:
        return work()
    results = []

    def looks() -> tuple[Any, str]:
        results.append(work())
        return looks_like(results[0]), socket.gethostname()

    told = comm.attempt(what, looks, raises=ExperimentError)
    first, first_host = told[0]
    for rank, (look, host) in enumerate(told):
        apart = difference(first, look, what)
        if apart is not None:
            raise ExperimentError(
                f"{apart.key} is {apart.before} on rank 0 of {comm.size}, on {first_host}, and {apart.now} on rank "
                f"{rank}, on {host}: all ranks must find the same {what}"
            )
    return results[0]


def look_of(splits: dict[str, Arrays]) -> dict[str, Any]:
    """How many samples of which shape a data set has, and checksums of all targets and some of the inputs."""
    return {
        split: {
            "samples": len(data),
            "shape": list(data.shape),
            "checksum of targets": _checksum(data.targets),
            "checksum of inputs": _checksum(data.inputs[:: max(len(data) // MOST_ROWS, 1)]),
        }
        for split, data in splits.items()
    }


def _checksum(values: np.ndarray) -> str:
    return digest_of((values,))
