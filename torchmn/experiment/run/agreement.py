"""Checks that all ranks get the same results: each rank reads file and data itself, possibly from a local disk."""

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
"""Number of samples of a data set whose inputs are compared, as reading all of them would be slow."""


def on_rank_0(comm: Communicator, what: str, work: Callable[[], Result]) -> Result:
    """Calls `work()` on rank 0 and returns its result on every rank; an error there is raised on every rank.

    Args:
        comm: the ranks, all of which must call.
        what: name of the work in messages.
        work: called without arguments.

    Raises:
        ExperimentError: on every rank, if `work()` fails.
    """
    return comm.attempt(what, work, root=0, raises=ExperimentError)[0]


def on_every_rank(
    comm: Communicator, what: str, work: Callable[[], Result], fingerprint: Callable[[Result], Any]
) -> Result:
    """Calls `work()` on every rank, and returns this rank's result if all ranks have the same.

    Args:
        comm: the ranks, all of which must call.
        what: name of the result in messages.
        work: called without arguments.
        fingerprint: returns plain values by which results are compared.

    Raises:
        ExperimentError: on every rank, if `work()` fails on one, or the fingerprints differ.
    """
    if comm.size == 1:
        return work()
    results = []

    def attempt() -> tuple[Any, str]:
        results.append(work())
        return fingerprint(results[0]), socket.gethostname()

    fingerprints = comm.attempt(what, attempt, raises=ExperimentError)
    first, first_host = fingerprints[0]
    for rank, (other, host) in enumerate(fingerprints):
        found = difference(first, other, what)
        if found is not None:
            raise ExperimentError(
                f"{found.key} is {found.before} on rank 0 of {comm.size}, on {first_host}, and {found.now} on rank "
                f"{rank}, on {host}: all ranks must have the same {what}"
            )
    return results[0]


def dataset_fingerprint(splits: dict[str, Arrays]) -> dict[str, Any]:
    """Returns number and shape of the samples of each split, and checksums of all targets and some of the inputs."""
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
