"""Channel: sends and receives the payloads of one edge between two ranks; differentiable."""

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
from torchmn.graph.description import GraphEdge
from torchmn.graph.payload import TENSOR, Heading, flatten, restore

_SAME_HEADING = wire.empty_bytes(0)
_SINGLE_TENSOR = Heading()


class Channel:
    """This rank's end of `edge`. Both ends store the last heading, so that it is sent only if it changes.

    A single tensor with the same heading as before is sent as one tensor. Any other payload is sent as a tuple, whose
    first element is the heading, or empty if the heading is the same as before.
    """

    def __init__(self, edge: GraphEdge, comm: Communicator, tag: int):
        self.edge = edge
        self.comm = comm
        self.tag = tag
        self.payloads = 0  # sent or received so far
        self._heading = _SINGLE_TENSOR
        self._encoded = _SINGLE_TENSOR.encode()

    def send(self, payload: Any, rows: int | None, delegate: Tensor | None) -> Tensor | None:
        """Sends without waiting; returns the delegate of `delegate` and of this payload."""
        if isinstance(payload, Tensor) and self._heading == (TENSOR, rows):
            message = payload
        else:
            message = self._with_heading(payload, rows)
        self.payloads += 1
        return join(delegate, (F.send(message, self.comm, self.edge.target.rank, self.tag),))

    def _with_heading(self, payload: Any, rows: int | None) -> tuple[Tensor, ...]:
        where = f"rank {self.comm.rank} of {self.comm.size}: what {self.edge.source} sends to {self.edge.target}"
        tensors, structure = flatten(payload, where)
        heading = Heading(structure, rows)
        # Compared as bytes: 1, 1.0 and True are equal, and NaN is not equal to itself.
        encoded = heading.encode()
        if encoded == self._encoded:
            return (_SAME_HEADING, *tensors)
        self._heading, self._encoded = heading, encoded
        return (wire.from_bytes(encoded), *tensors)

    def receive(self, delegate: Tensor | None) -> tuple[Any, int | None, Tensor | None]:
        """Waits; returns the payload, the rows of its micro-batch, and the delegate of it and of `delegate`."""
        self.payloads += 1
        message = F.recv(self.comm, self.edge.source.rank, delegate, self.tag)
        tensors = (message,) if isinstance(message, Tensor) else message[1:]
        if not isinstance(message, Tensor) and message[0].numel():
            self._heading = Heading.decode(wire.to_bytes(message[0]))
        if any(x.requires_grad for x in tensors):
            delegate = join(None, tensors)  # backward from the tensors reaches `delegate`, too
        remaining = iter(tensors)
        payload = restore(self._heading.structure, remaining)
        if next(remaining, None) is not None:
            raise GraphError(f"{self.edge.target} got more tensors from {self.edge.source} than its heading contains")
        return payload, self._heading.rows, delegate

    def drop(self, sent: int) -> None:
        """Receives and discards the rest of the `sent` payloads of the other end, whose sender waits for gradients."""
        while self.payloads < sent:
            self.payloads += 1
            with torch.no_grad(), suppress(PeerError):  # the sender may have raised instead of sending
                F.recv(self.comm, self.edge.source.rank, None, self.tag)
