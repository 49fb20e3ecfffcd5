"""A world of one: every operation works, and nothing is sent."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchmn.communicators.base import Communicator
from torchmn.communicators.settings import Settings
from torchmn.communicators.topology import Place
from torchmn.communicators.watchdog import Watch
from torchmn.communicators.wire import Message


class SoloCommunicator(Communicator):
    """The communicator of a process that was started alone."""

    def __init__(self, settings: Settings, place: Place | None = None):
        host = socket.gethostname()
        super().__init__(place or Place.in_world("world", [host], Watch(0, host)), settings)

    def _subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> Communicator | None:
        return None if color is None else SoloCommunicator(replace(self.settings), self._place.among([0], name))

    def _same_everywhere(self, number: int) -> bool:
        return True

    def _reduces(self, dtype: torch.dtype, op: str) -> bool:
        return True

    def _allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        whole.copy_(flat)

    # A rank can neither send to itself nor wait for itself: what is left of these has nothing to do.

    def _exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None: ...

    def _barrier(self) -> None: ...

    def _bcast_(self, flat: Tensor, root: int) -> None: ...

    def _allreduce_(self, source: Tensor, x: Tensor, op: str, scale: float = 1.0) -> None:
        if source is not x:
            x.copy_(source)

    def _flush(self) -> None: ...

    def _close(self) -> None: ...

    def _post(self, message: Message, dest: int, tag: int) -> None:
        raise AssertionError("a world of one has nobody to send to")

    def _take(self, source: int, tag: int) -> Message:
        raise AssertionError("a world of one has nobody to receive from")
