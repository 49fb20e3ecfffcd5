"""`create_multi_node_iterator`: an iterator that sends the batches of one rank's loader to all ranks."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.communicators.messages.wire import DTYPE_CODES, TensorSpec
from torchmn.communicators.objects import pack, unpack
from torchmn.errors import ArgumentError, PeerError
from torchmn.iterators.epochs import EpochIterator
from torchmn.other_spellings import other_spellings

# Smaller tensors are packed into one message with the structure of the batch; larger ones are sent without a copy.
LARGE_BYTES = 1 << 20

# Batches of the same layout are sent without pickling, a message per tensor. For more tensors, one message is faster.
_MOST_TENSORS = 8

_OPERATION = "multi-node iterator"


class _Event(IntEnum):
    BATCH = 0
    END = 1
    FAILURE = 2


class _Layout(NamedTuple):
    """A list, tuple or dict of a few tensors on the host: ranks that know it need only the tensors.

    Attributes:
        kind: class of the container.
        keys: of a dict; () otherwise.
        specs: shapes and dtypes of the tensors.
    """

    kind: type
    keys: tuple[str, ...]
    specs: tuple[TensorSpec, ...]

    @staticmethod
    def of(batch: Any) -> _Layout | None:
        """Returns the layout of a batch, or None if it has none."""
        kind = type(batch)
        if kind not in (list, tuple, dict) or not 0 < len(batch) <= _MOST_TENSORS:
            return None
        values = batch.values() if kind is dict else batch
        keys = tuple(batch) if kind is dict else ()
        if not all(type(key) is str for key in keys) or not all(map(_is_simple, values)):
            return None
        return _Layout(kind, keys, tuple([TensorSpec(x.dtype, tuple(x.shape)) for x in values]))

    def tensors(self, batch: Any) -> list[Tensor]:
        """Returns the tensors of a batch that has this layout, contiguous."""
        return [x.contiguous() for x in (batch.values() if self.kind is dict else batch)]

    def batch(self, tensors: list[Tensor]) -> Any:
        """Returns the batch of these tensors."""
        return dict(zip(self.keys, tensors, strict=True)) if self.kind is dict else self.kind(tensors)


def _is_simple(x: Any) -> bool:
    """Returns whether the memory of a tensor on the host, made contiguous, is all that describes it."""
    if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or x.requires_grad:
        return False
    return x.is_cpu and x.dtype in DTYPE_CODES and not (x.is_conj() or x.is_neg())


@other_spellings
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

    Returns:
        The iterable; each `iter` of it is one pass over the loader.

    Raises:
        ArgumentError: on every rank, for a wrong argument.
        MismatchError: on every rank, if `rank_master` differs between ranks.
    """
    comm = as_communicator(comm, "create_multi_node_iterator")
    problem = arguments.rank_problem(rank_master, comm.size, "rank_master")
    is_master = problem is None and comm.rank == rank_master
    if is_master and not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        problem = f"expected a DataLoader or another iterable on the master, got {arguments.describe(dataloader)}"
    comm.agree("create_multi_node_iterator", problem, rank_master=rank_master)
    length = comm.bcast_obj(_length(dataloader) if is_master else None, rank_master)
    return MultiNodeIterator(dataloader if is_master else None, comm, rank_master, length)


class MultiNodeIterator(EpochIterator):
    """The master's batches on every rank, epoch by epoch; made by `create_multi_node_iterator`. See `EpochIterator`.

    Each step is collective: all ranks must iterate together. An exception of the master's loader is raised on the
    master, and as a `PeerError` on the other ranks.
    """

    def __init__(self, loader: Any, comm: Communicator, rank_master: int, length: int | None) -> None:
        super().__init__()
        self.loader = loader
        self.comm = comm
        self.rank_master = rank_master
        self._length = length
        self._resumed = False
        self._layout: _Layout | None = None  # of the last batch that was packed; the next one usually has the same

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the loader of rank {self.rank_master} has no length")
        return self._length

    def _restart(self) -> None:
        self._resumed = False

    def _one_epoch(self) -> Iterator[Any]:
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
        self.epoch, self.position, self._resumed, self._batches = epoch, position, True, None

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
        is_master, layout = comm.rank == master, self._layout
        if is_master and layout is not None and (event != _Event.BATCH or _Layout.of(content) != layout):
            layout = None
        knows = layout is not None
        with comm.agreed(_OPERATION, differ=knows, epoch=self.epoch, batch=self.position) as ranks:
            if ranks.alike and layout is not None:
                tensors = layout.tensors(content) if is_master else [spec.empty() for spec in layout.specs]
                for x in tensors:
                    comm.bcast_into(x, master)
                return event, content if is_master else layout.batch(tensors)
            event, content = self._broadcast_packed(event, content, error)
        self._layout = _Layout.of(content) if event == _Event.BATCH else self._layout
        return event, content

    def _broadcast_packed(self, event: _Event, content: Any, error: Exception | None) -> tuple[_Event, Any]:
        """Broadcasts a batch of any kind, or an event; see `_broadcast`."""
        comm, master = self.comm, self.rank_master
        flat, large = None, []
        if comm.rank == master:
            try:
                flat, large = pack((event, content), LARGE_BYTES)
            except Exception as raised:  # pickling may run user code that raises anything
                problem = f"batch {self.position} of epoch {self.epoch}, of type {type(content).__name__}, "
                problem += f"cannot be sent: {type(raised).__name__}: {raised}"
                error = ArgumentError(f"rank {comm.rank} of {comm.size}: {_OPERATION}: {problem}")
                flat, large = pack((_Event.FAILURE, problem))
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
