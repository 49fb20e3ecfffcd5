"""Messages inside a part of the model that `torch.utils.checkpoint` computes again during backward.

A message was sent and received once, in forward; the other rank, which may not recompute anything, will neither send
nor receive it again. So what a checkpointed part received is kept, and recomputing it communicates nothing:

    checkpoint(part, x, use_reentrant=False, context_fn=torchmn.functions.keep_messages)

Without `keep_messages`, a `send` or `recv` that is recomputed raises. A collective operation that is recomputed runs
again, which is right if all ranks recompute it, and refused by the usual comparison of arguments if they do not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from copy import copy
from typing import Any

from torch import Tensor

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.wire import Message
from torchmn.context import here
from torchmn.errors import RecomputeError


class _Tape(AbstractContextManager):
    """Inside this context values are kept, or taken from those that were kept in the same order."""

    def __init__(self, values: list[tuple[str, Any]], replaying: bool):
        self.values = values  # each with where it is from
        self.replaying = replaying
        self.position = 0

    def __enter__(self) -> None:
        self.position = 0
        self._outer, here.tape = here.tape, self

    def __exit__(self, *_: object) -> None:
        here.tape = self._outer


def keep_messages() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` for `torch.utils.checkpoint.checkpoint` of a part that communicates (`use_reentrant=False`).

    What the part receives is kept until its backward; that memory is not saved.
    """
    values: list[tuple[str, Any]] = []
    return _Tape(values, replaying=False), _Tape(values, replaying=True)


def check_replaying(comm: Communicator, operation: str) -> None:
    """Raise if this is a recomputation for which nothing was kept; it is called for messages during backward."""
    if not replaying():
        raise RecomputeError(
            f"rank {comm.rank} of {comm.size}: {operation} during backward, in a part that torch.utils.checkpoint "
            "computes again: its message was sent and received in forward, and is not sent again. Keep communication "
            "out of checkpointed parts, or checkpoint(..., use_reentrant=False, "
            "context_fn=torchmn.functions.keep_messages)."
        )


def replaying() -> bool:
    """Whether the values of forward are to be taken instead of communicating."""
    return here.tape is not None and here.tape.replaying


def keeping() -> bool:
    """Whether this is a part that will be recomputed."""
    return here.tape is not None


def record(what: str, value: Any) -> None:
    """Keep a value, if this is a part that will be recomputed; `what` says where it is from."""
    if here.tape is not None and not here.tape.replaying:
        here.tape.values.append((what, _copied(value)))


def replay(comm: Communicator, what: str) -> Any:
    """The value that was kept at the same place, if it is from there, too."""
    tape = here.tape
    assert tape is not None
    kept, value = tape.values[tape.position] if tape.position < len(tape.values) else ("nothing more", None)
    if kept != what:
        raise RecomputeError(
            f"rank {comm.rank} of {comm.size}: the part that torch.utils.checkpoint computes again wants {what}, where "
            f"forward had {kept}. It must make the same calls in the same order: what it decides by must not change "
            "between the two (a random number, a counter, a tensor that is changed in place)."
        )
    tape.position += 1
    return _copied(value)


def _copied(value: Any) -> Any:
    """A copy that the part may change in place, as it may change what it received."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_copied(each) for each in value)
    if isinstance(value, Message):
        value = copy(value)
        value.tensors = _copied(value.tensors)
    return value
