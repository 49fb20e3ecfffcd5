"""keep_messages: communication inside of a part of the model that `torch.utils.checkpoint` recomputes in backward.

A message is sent and received once, in forward; the other rank, which may not recompute anything, neither sends nor
receives it again. So what a checkpointed part receives is recorded, and its recomputation does not communicate:

    checkpoint(part, x, use_reentrant=False, context_fn=torchmn.functions.keep_messages)

Without `keep_messages`, a recomputed `send` or `recv` raises an error. A recomputed collective operation runs again.
That is correct if all ranks recompute it; if they do not, the comparison of arguments raises an error.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import copy
from typing import Any, cast

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.wire import Message
from torchmn.context import here
from torchmn.errors import RecomputeError


class _Tape(AbstractContextManager[None]):
    """Context in which received values are recorded, or replayed in the order in which they were recorded."""

    def __init__(self, values: list[tuple[str, Any]], replaying: bool):
        self.values = values  # each with a description of its source
        self.replaying = replaying
        self.position = 0

    def __enter__(self) -> None:
        self.position = 0
        self._outer, here.tape = here.tape, self

    def __exit__(self, *_: object) -> None:
        here.tape = self._outer


def keep_messages() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of forward and of recomputation, for a checkpointed part that communicates.

    Pass it as `context_fn` to `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`. What the part receives
    stays in memory until its backward.
    """
    values: list[tuple[str, Any]] = []
    return _Tape(values, replaying=False), _Tape(values, replaying=True)


def check_replaying(comm: Communicator, operation: str) -> None:
    """Raises a RecomputeError in a recomputation without `keep_messages`. Called for messages during backward."""
    if not replaying():
        raise RecomputeError(
            f"rank {comm.rank} of {comm.size}: {operation} during backward, in a part that torch.utils.checkpoint "
            "recomputes: its message was sent and received in forward, and is not sent again. Keep communication "
            "out of checkpointed parts, or checkpoint(..., use_reentrant=False, "
            "context_fn=torchmn.functions.keep_messages)."
        )


def replaying() -> bool:
    """Whether this is a recomputation that replays what forward received."""
    return here.tape is not None and here.tape.replaying


def recording() -> bool:
    """Whether this is a part with `keep_messages`."""
    return here.tape is not None


def record(what: str, value: Any) -> None:
    """Records a value in the forward of a part with `keep_messages`; `what` describes its source."""
    if here.tape is not None and not here.tape.replaying:
        here.tape.values.append((what, _copied(value)))


def replay(comm: Communicator, what: str) -> Any:
    """Returns the next recorded value; raises a RecomputeError if its source is not `what`."""
    tape = here.tape
    assert tape is not None
    recorded, value = tape.values[tape.position] if tape.position < len(tape.values) else ("nothing more", None)
    if recorded != what:
        raise RecomputeError(
            f"rank {comm.rank} of {comm.size}: the part that torch.utils.checkpoint recomputes expects {what}, where "
            f"forward had {recorded}. It must make the same calls in the same order: its decisions must not depend on "
            "what changes in between (a random number, a counter, a tensor that is changed in place)."
        )
    tape.position += 1
    return _copied(value)


def _copied(value: Any) -> Any:
    """Returns a copy: the part may change what it received in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_copied(each) for each in cast("tuple[Any, ...]", value))
    if isinstance(value, Message):
        value = copy(value)
        value.tensors = _copied(value.tensors)
    return value
