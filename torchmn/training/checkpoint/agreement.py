"""Steps that all ranks take together: what fails on one rank raises on every rank, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torchmn.communicators.base import Communicator
from torchmn.communicators.watchdog import ranks_text
from torchmn.errors import TorchMNError
from torchmn.training.checkpoint.errors import CheckpointError

Result = TypeVar("Result")


def together(comm: Communicator, operation: str, work: Callable[[], Result]) -> list[Result]:
    """What `work()` returned on each rank; raises `CheckpointError` on all ranks if it raised on one."""
    result, problem, cause = None, None, None
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        cause = error
        known = isinstance(error, OSError | ValueError | TorchMNError)
        problem = str(error) if known else f"{type(error).__name__}: {error}"
    told = comm.allgather_obj((problem, result if problem is None else None))
    problems = {rank: text for rank, (text, _) in enumerate(told) if text}
    if problems:
        raise CheckpointError("\n".join(by_rank(f"of {comm.size}: {operation}", problems))) from cause
    return [value for _, value in told]


def by_rank(what: str, texts: Mapping[int, str]) -> list[str]:
    """One line per text, with the ranks that say it: `ranks 0-2 <what>: <text>`."""
    speakers: dict[str, list[int]] = {}
    for rank, text in texts.items():
        speakers.setdefault(text, []).append(rank)
    return [f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)} {what}: {text}" for text, ranks in speakers.items()]
