"""One end of an edge that crosses ranks: payloads go in at one rank and come out at the other, with their gradients."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from torchmn import functions as F
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages import wire
from torchmn.errors import GraphError, PeerError
from torchmn.graph.delegates import join
from torchmn.graph.description import Edge
from torchmn.graph.payload import TENSOR, Heading, flatten, restore

_AS_BEFORE = wire.room(0)
_LONE_TENSOR = Heading()


class Channel:
    """This rank's end of `edge`. Both ends remember the last heading, so it travels only when it changes.

    A payload that is one tensor, under the heading of the one before, is sent as it is. Any other is sent as a tuple
    whose first element is the heading, or empty if it is that of the payload before.
    """

    def __init__(self, edge: Edge, comm: Communicator, tag: int):
        self.edge = edge
        self.comm = comm
        self.tag = tag
        self.passed = 0  # payloads that went through this end
        self._heading = _LONE_TENSOR
        self._encoded = _LONE_TENSOR.encode()

    def send(self, payload: Any, rows: int | None, delegate: Tensor | None) -> Tensor | None:
        """Send without waiting; the delegate that stands for `delegate` and for the gradient that will come back."""
        if isinstance(payload, Tensor) and self._heading == (TENSOR, rows):
            message = payload
        else:
            message = self._with_heading(payload, rows)
        self.passed += 1
        return join(delegate, (F.send(message, self.comm, self.edge.target.rank, self.tag),))

    def _with_heading(self, payload: Any, rows: int | None) -> tuple[Tensor, ...]:
        where = f"rank {self.comm.rank} of {self.comm.size}: what {self.edge.source} sends to {self.edge.target}"
        tensors, structure = flatten(payload, where)
        heading = Heading(structure, rows)
        # As bytes: 1, 1.0 and True are equal, and NaN is not even itself.
        encoded = heading.encode()
        if encoded == self._encoded:
            return (_AS_BEFORE, *tensors)
        self._heading, self._encoded = heading, encoded
        return (wire.from_bytes(encoded), *tensors)

    def receive(self, delegate: Tensor | None) -> tuple[Any, int | None, Tensor | None]:
        """The next payload, the rows of its micro-batch, and the delegate that stands for it and for `delegate`."""
        self.passed += 1
        message = F.recv(self.comm, self.edge.source.rank, delegate, self.tag)
        tensors = (message,) if isinstance(message, Tensor) else message[1:]
        if not isinstance(message, Tensor) and message[0].numel():
            self._heading = Heading.decode(wire.to_bytes(message[0]))
        if any(x.requires_grad for x in tensors):
            delegate = join(None, tensors)  # `delegate` itself hangs behind the tensors now
        remaining = iter(tensors)
        payload = restore(self._heading.structure, remaining)
        if next(remaining, None) is not None:
            raise GraphError(f"{self.edge.target} got more tensors from {self.edge.source} than it was told of")
        return payload, self._heading.rows, delegate

    def drop(self, sent: int) -> None:
        """Receive what is left of the `sent` payloads of the other end, for nobody: their sender need not wait."""
        while self.passed < sent:
            self.passed += 1
            with torch.no_grad(), suppress(PeerError):  # or its sender could not send it
                F.recv(self.comm, self.edge.source.rank, None, self.tag)
