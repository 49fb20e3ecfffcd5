"""`create_multi_node_iterator`: an iterator that sends the batches of one rank's loader to all ranks."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.objects import pack, unpack
from torchmn.errors import ArgumentError, PeerError

# Smaller tensors are packed into one message with the structure of the batch; larger ones are sent without a copy.
LARGE_BYTES = 1 << 20

_OPERATION = "multi-node iterator"


class _Event(IntEnum):
    BATCH = 0
    END = 1
    FAILURE = 2


def create_multi_node_iterator(
    dataloader: Iterable[Any] | None, comm: Communicator, rank_master: int = 0
) -> MultiNodeIterator:
    """Returns an iterable over the batches of rank `rank_master`'s loader, on every rank; all ranks must call.

    A batch may be any nested structure that pickles; its tensors are sent as tensors, bit for bit. The master gets the
    batch itself.

    Args:
        dataloader: on the master, a `DataLoader` or any iterable that can be iterated once per epoch; ignored on other
            ranks. The length of the returned iterable is determined once, by this call.
        comm: communicator whose ranks get the batches.
        rank_master: the rank that reads the data.

    Raises:
        ArgumentError: on every rank, for a wrong argument.
        MismatchError: on every rank, if `rank_master` differs between ranks.
    """
    problem = arguments.rank_problem(rank_master, comm.size, "rank_master")
    is_master = problem is None and comm.rank == rank_master
    if is_master and not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        problem = f"expected a DataLoader or another iterable on the master, got {arguments.describe(dataloader)}"
    comm.agree("create_multi_node_iterator", problem, rank_master=rank_master)
    length = comm.bcast_obj(_length(dataloader) if is_master else None, rank_master)
    return MultiNodeIterator(dataloader if is_master else None, comm, rank_master, length)


class MultiNodeIterator:
    """The master's batches on every rank, epoch by epoch; made by `create_multi_node_iterator`.

    Each step is collective: all ranks must iterate together. An exception of the master's loader is raised on the
    master, and as a `PeerError` on the other ranks.

    Attributes:
        epoch: number of the current epoch, from 0.
        position: number of batches of this epoch that were returned.
    """

    def __init__(self, loader: Any, comm: Communicator, rank_master: int, length: int | None) -> None:
        self.loader = loader
        self.comm = comm
        self.rank_master = rank_master
        self.epoch = 0
        self.position = 0
        self._length = length
        self._resumed = False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the loader of rank {self.rank_master} has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Iterates over one epoch; after `load_state_dict`, over the rest of the saved epoch."""
        if self.position > 0 and not self._resumed:
            self.epoch, self.position = self.epoch + 1, 0  # the last epoch was not iterated to its end
        self._resumed = False
        batches: Iterator[Any] | None = None
        while True:
            event, content, error = _Event.BATCH, None, None
            if self.comm.rank == self.rank_master:
                try:
                    batches = iter(self.loader) if batches is None else batches
                    content = next(batches)
                except StopIteration:
                    event = _Event.END
                except Exception as raised:
                    event, error = _Event.FAILURE, raised
                    content = f"its loader raised\n{''.join(traceback.format_exception(raised))}"
            event, content = self._broadcast(event, content, error)
            if event == _Event.END:
                self.epoch, self.position = self.epoch + 1, 0
                return
            self.position += 1
            yield content

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the state of the master's loader, the same on every rank; collective."""
        is_master = self.comm.rank == self.rank_master
        problem = self._resume_problem("state_dict") if is_master else None
        self.comm.agree(f"{_OPERATION}: state_dict", problem, epoch=self.epoch, batch=self.position)
        state = self.comm.bcast_obj(self.loader.state_dict() if is_master else None, self.rank_master)
        return {"epoch": self.epoch, "position": self.position, "loader": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the position of `state`, which must be the same on every rank; collective."""
        is_master = self.comm.rank == self.rank_master
        problem = self._resume_problem("load_state_dict") if is_master else None
        epoch, position = int(state["epoch"]), int(state["position"])
        self.comm.agree(f"{_OPERATION}: load_state_dict", problem, epoch=epoch, batch=position)
        if is_master:
            self.loader.load_state_dict(state["loader"])
        self.epoch, self.position, self._resumed = epoch, position, True

    def _resume_problem(self, method: str) -> str | None:
        if hasattr(self.loader, method):
            return None
        return (
            f"expected a loader with {method}, got {type(self.loader).__name__}: give the master a loader that can be "
            "resumed, such as create_synchronized_iterator(dataloader, comm.split(comm.rank)) (every rank calls split)"
        )

    def _broadcast(self, event: _Event, content: Any, error: Exception | None) -> tuple[_Event, Any]:
        """Returns the master's event and content on every rank, or raises its error."""
        comm, master = self.comm, self.rank_master
        if comm.size == 1:  # not packed, so that the batch need not pickle
            if error is not None:
                raise error
            return event, content
        flat, large = None, []
        if comm.rank == master:
            try:
                flat, large = pack((event, content), LARGE_BYTES)
            except Exception as raised:  # pickling may run user code that raises anything
                problem = f"batch {self.position} of epoch {self.epoch}, of type {type(content).__name__}, "
                problem += f"cannot be sent: {type(raised).__name__}: {raised}"
                error = ArgumentError(f"rank {comm.rank} of {comm.size}: {_OPERATION}: {problem}")
                flat, large = pack((_Event.FAILURE, problem))
        with comm.agreed(_OPERATION, epoch=self.epoch, batch=self.position):
            flat = comm.bcast(flat, master)
            for x in large:
                comm.bcast(x, master)
            if error is not None:
                raise error
            if comm.rank == master:
                return event, content
            event, content = unpack(flat, comm.device, lambda spec: comm.bcast(None, master))
        if event == _Event.FAILURE:
            raise PeerError(f"rank {comm.rank} of {comm.size}: {_OPERATION}: rank {master}: {content}")
        return event, content


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an iterable data set, or a generator
        return None
