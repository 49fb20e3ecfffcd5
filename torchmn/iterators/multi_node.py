"""One rank's batches on all ranks."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.communicators.objects import pack, unpack
from torchmn.errors import ArgumentError, PeerError

# Smaller tensors share one message with the batch's structure; a larger one is worth its own, from and to the
# memory it lies in.
LARGE_BYTES = 1 << 20

_OPERATION = "multi-node iterator"


class _News(IntEnum):
    BATCH = 0
    END = 1
    FAILURE = 2


def create_multi_node_iterator(
    dataloader: Iterable[Any] | None, comm: Communicator, rank_master: int = 0
) -> MultiNodeIterator:
    """An iterable over the batches of rank `rank_master`'s loader, on every rank; every rank calls it.

    dataloader: a `DataLoader`, or any iterable that can be iterated once per epoch; other ranks' is ignored and may
        be None.

    A batch may be any nested structure that pickles; its tensors travel as tensors, bit by bit, and the master
    gets its own batch back. `len()` is the master's, taken here.
    """
    problem = arguments.rank_problem(rank_master, comm.size, "rank_master")
    is_master = problem is None and comm.rank == rank_master
    if is_master and not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        problem = f"expected a DataLoader or another iterable on the master, got {arguments.describe(dataloader)}"
    comm.agree("create_multi_node_iterator", problem, rank_master=rank_master)
    length = comm.bcast_obj(_length(dataloader) if is_master else None, rank_master)
    return MultiNodeIterator(dataloader if is_master else None, comm, rank_master, length)


class MultiNodeIterator:
    """The master's batches on every rank, epoch by epoch. Made by `create_multi_node_iterator`.

    Each step is collective: every rank must take the same steps. An error in the master's loader is raised there as
    it is, and on the other ranks as a `PeerError`.
    """

    def __init__(self, loader: Any, comm: Communicator, rank_master: int, length: int | None) -> None:
        self.loader = loader
        self.comm = comm
        self.rank_master = rank_master
        self.epoch = 0
        self.position = 0  # batches of this epoch that were given out
        self._length = length
        self._resumed = False

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the loader of rank {self.rank_master} has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """One epoch; after `load_state_dict`, the rest of the epoch that was saved."""
        if self.position > 0 and not self._resumed:
            self.epoch, self.position = self.epoch + 1, 0  # the last epoch was left before its end
        self._resumed = False
        batches: Iterator[Any] | None = None
        while True:
            news, content, error = _News.BATCH, None, None
            if self.comm.rank == self.rank_master:
                try:
                    batches = iter(self.loader) if batches is None else batches
                    content = next(batches)
                except StopIteration:
                    news = _News.END
                except Exception as raised:
                    news, error = _News.FAILURE, raised
                    content = f"its loader raised\n{''.join(traceback.format_exception(raised))}"
            news, content = self._share(news, content, error)
            if news == _News.END:
                self.epoch, self.position = self.epoch + 1, 0
                return
            self.position += 1
            yield content

    def state_dict(self) -> dict[str, Any]:
        """Where the iterator stands and the state of the master's loader, the same on every rank (collective)."""
        is_master = self.comm.rank == self.rank_master
        problem = self._stateless("state_dict") if is_master else None
        self.comm.agree(f"{_OPERATION}: state_dict", problem, epoch=self.epoch, batch=self.position)
        state = self.comm.bcast_obj(self.loader.state_dict() if is_master else None, self.rank_master)
        return {"epoch": self.epoch, "position": self.position, "loader": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the iterator that saved `state` stood; every rank calls it with the same (collective)."""
        is_master = self.comm.rank == self.rank_master
        problem = self._stateless("load_state_dict") if is_master else None
        epoch, position = int(state["epoch"]), int(state["position"])
        self.comm.agree(f"{_OPERATION}: load_state_dict", problem, epoch=epoch, batch=position)
        if is_master:
            self.loader.load_state_dict(state["loader"])
        self.epoch, self.position, self._resumed = epoch, position, True

    def _stateless(self, method: str) -> str | None:
        if hasattr(self.loader, method):
            return None
        return (
            f"expected a loader with {method}, got {type(self.loader).__name__}: give the master a loader that can be "
            "resumed, such as create_synchronized_iterator(dataloader, comm.split(comm.rank)) (every rank calls split)"
        )

    def _share(self, news: _News, content: Any, error: Exception | None) -> tuple[_News, Any]:
        """The master's news on every rank, or its error."""
        comm, master = self.comm, self.rank_master
        if comm.size == 1:  # the batch stays here: it need not pickle
            if error is not None:
                raise error
            return news, content
        flat, large = None, []
        if comm.rank == master:
            try:
                flat, large = pack((news, content), LARGE_BYTES)
            except Exception as raised:  # pickling runs the batch's own code, which may raise anything
                problem = f"batch {self.position} of epoch {self.epoch}, of type {type(content).__name__}, "
                problem += f"can not be sent: {type(raised).__name__}: {raised}"
                error = ArgumentError(f"rank {comm.rank} of {comm.size}: {_OPERATION}: {problem}")
                flat, large = pack((_News.FAILURE, problem))
        with comm.agreed(_OPERATION, epoch=self.epoch, batch=self.position):
            flat = comm.bcast(flat, master)
            for x in large:
                comm.bcast(x, master)
            if error is not None:
                raise error
            if comm.rank == master:
                return news, content
            news, content = unpack(flat, comm.device, lambda spec: comm.bcast(None, master))
        if news == _News.FAILURE:
            raise PeerError(f"rank {comm.rank} of {comm.size}: {_OPERATION}: rank {master}: {content}")
        return news, content


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # an iterable data set, or a generator
        return None
