"""What a transport provides: flat, contiguous buffers and small messages, moved between ranks.

Arguments are checked, staged and cut to size before they come here; every method is called by all ranks it concerns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from torchmn.communicators.settings import Settings
from torchmn.communicators.wire import Message

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator


class Exchange(Protocol):
    """Buffers on their way."""

    def wait(self) -> None:
        """Return when all have been sent and filled."""

    def wait_received(self) -> None:
        """Return when all are filled; those that were sent may still be read, and must never change again.

        So a rank waits for what it needs, and not for slower ones to take what they need.
        """


class _Done:
    def wait(self) -> None: ...

    def wait_received(self) -> None: ...


DONE = _Done()
"""An exchange that has ended."""


class Transport(ABC):
    """One rank's end of the lines to all the others."""

    rank: int
    size: int
    settings: Settings
    closed_because = "on a communicator that was finalized"
    tag_limit = 1 << 30  # users' tags are smaller; this one is backward's
    tells_arrivals = True  # whether `_has_arrived` sees what has come and was not taken
    dies_of_other_sizes = False  # a message that does not fit the room made for it ends the process
    reads_gpu_memory = False  # else GPU tensors are staged through the host
    ranks_share_a_process = False  # then they share torch's random generator, too
    carried_bytes = 0  # a tensor of so many bytes may travel with the number that ranks compare

    def _send_at_once(self, x: Tensor, dest: int, tag: int, number: int = 0, wants_gradient: bool = False) -> bool:
        """Send a tensor by a shorter way than `_post`; False if it does not fit, or there is no such way."""
        return False

    @abstractmethod
    def _post(self, message: Message, dest: int, tag: int) -> None:
        """Start to send and return without waiting for the receiver; the tensors may change afterwards."""

    @abstractmethod
    def _take(self, source: int, tag: int) -> Message:
        """Wait for the next message from `source` with `tag`."""

    def _has_arrived(self, source: int, tag: int) -> bool:
        """Whether `_take` would return at once; False, too, if the transport can not tell."""
        return False

    @abstractmethod
    def _exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send and fill flat buffers, all at once, and return when all are done; sizes match at both ends."""

    def _start_exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Exchange:
        """Start what `_exchange` does and return; no buffer may be touched until the exchange has been waited for.

        Exchanges between two ranks are matched in the order in which they were started.
        """
        self._exchange(outgoing, incoming)
        return DONE

    @abstractmethod
    def _same_everywhere(self, number: int) -> bool:
        """Whether every rank passed the same 64-bit number."""

    def _same_everywhere_carrying(self, number: int, carried: Tensor) -> bool:
        """`_same_everywhere`, with a contiguous tensor of at most `carried_bytes` that goes to every rank."""
        raise NotImplementedError

    def _carried_parts(self, carried: Tensor) -> list[Tensor]:
        """All ranks' tensors, in rank order, that came with the number; valid until the next comparison."""
        raise NotImplementedError

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _bcast_(self, flat: Tensor, root: int) -> None:
        """Fill `flat` with root's."""

    @abstractmethod
    def _reduces(self, dtype: torch.dtype, op: str) -> bool:
        """Whether `_allreduce_` can do this pair."""

    @abstractmethod
    def _allreduce_(self, source: Tensor, x: Tensor, op: str, scale: float = 1.0) -> None:
        """Reduce contiguous `source` over ranks into contiguous `x`, which may be the same, and multiply by `scale`.

        op is sum, max, min or prod.
        """

    @abstractmethod
    def _allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        """Fill `whole` with all ranks' `flat`, of `counts[rank]` elements."""

    @abstractmethod
    def _subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> Communicator | None:
        """The communicator of this rank's color; every rank of this one calls it."""

    def _undelivered(self) -> list[int]:
        """The ranks that have not received yet what was posted to them."""
        return []

    @abstractmethod
    def _flush(self) -> None:
        """Wait until everything posted has been received."""

    @abstractmethod
    def _close(self) -> None:
        """Give back what the transport holds."""
