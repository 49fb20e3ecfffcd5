"""The transport of a group of one rank, which sends nothing: `SoloTransport`."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from torchmn.communicators.messages import reductions
from torchmn.communicators.messages.wire import Message
from torchmn.communicators.transports.group import Group, Settings
from torchmn.communicators.transports.transport import DONE, Carrier, Exchange, PeerBuffers, Pending, Traits
from torchmn.communicators.watchdog.waits import Watch


class SoloTransport:
    """The transport of a rank that is alone in its group."""

    traits = Traits("solo")
    carrier: Carrier | None = None

    def __init__(self, group: Group):
        self.group = group

    @staticmethod
    def of_world(settings: Settings) -> SoloTransport:
        """Returns the transport of a process that was started alone."""
        host = socket.gethostname()
        return SoloTransport(Group.of_world("world", [host], Watch(0, host), settings))

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        raise AssertionError("a group of one rank has no other rank to send to")

    def take(self, source: int, tag: int) -> Message:
        raise AssertionError("a group of one rank has no other rank to receive from")

    def arrived(self, source: int, tag: int) -> bool:
        return False

    def exchange(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Exchange:
        return DONE

    def equal(self, number: int) -> bool:
        return True

    def bcast_(self, flat: Tensor, root: int) -> None: ...

    def allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        whole.copy_(flat)

    def allreduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> bool:
        if source is not out:
            out.copy_(source)
        reductions.scale_(out, scale)
        return True

    def subgroup(self, members_of: Mapping[int, list[int]], color: int | None, name: str) -> SoloTransport | None:
        return None if color is None else SoloTransport(self.group.among(members_of[color], name))

    def undelivered(self) -> list[int]:
        return []

    def flush(self) -> Iterable[Pending]:
        return ()

    def close(self) -> None: ...
