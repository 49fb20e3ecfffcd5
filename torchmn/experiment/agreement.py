"""What all ranks must find alike: each reads the file and the data by itself, maybe on a disk of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from torchmn.communicators.base import Communicator
from torchmn.datasets import Arrays
from torchmn.errors import ExperimentError, TorchMNError
from torchmn.experiment.run_directory import difference

Result = TypeVar("Result")
MOST_ROWS = 64
"""How many samples of a data set are compared: all of it would have to be read."""


def on_rank_0(comm: Communicator, work: Callable[[], Result]) -> Result:
    """What `work()` returns on rank 0, on every rank; what it raises there is raised on every rank."""
    told: tuple[Result | None, str | None] | None = None
    if comm.rank == 0:
        try:
            told = work(), None
        except TorchMNError as error:
            told = None, str(error)
    result, problem = comm.bcast_obj(told)
    if problem is not None:
        raise ExperimentError(problem)
    return result


def on_every_rank(
    comm: Communicator, what: str, work: Callable[[], Result], looks_like: Callable[[Result], Any]
) -> Result:
    """What `work()` returns here; an ExperimentError on all ranks, if it fails on one or they do not get the same.

    what: its name for messages. looks_like: plain values that tell one result from another.
    """
    if comm.size == 1:
        return work()
    result, problem, looks = None, None, None
    try:
        result = work()
        looks = looks_like(result)
    except ExperimentError as error:
        problem = str(error)
    told = comm.allgather_obj((problem, looks, socket.gethostname()))
    problems = [problem for problem, _, _ in told]
    for rank, (problem, looks, host) in enumerate(told):
        if problem is not None:
            everywhere = all(other == problem for other in problems)
            raise ExperimentError(problem if everywhere else f"rank {rank} of {comm.size}, on {host}: {problem}")
        apart = difference(told[0][1], looks, what)
        if apart is not None:
            here = f"{apart.before} on rank 0 of {comm.size}, on {told[0][2]}"
            raise ExperimentError(
                f"{apart.key} is {here}, and {apart.now} on rank {rank}, on {host}: all ranks must find the same {what}"
            )
    return result  # type: ignore[return-value]


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
    return f"{crc32(np.ascontiguousarray(values).tobytes()):08x}"
