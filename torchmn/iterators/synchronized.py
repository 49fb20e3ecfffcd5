"""`create_synchronized_iterator`: each rank's loader, iterated in an order that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.data.partition import draw_seed
from torchmn.errors import TorchMNError
from torchmn.iterators import order as orders
from torchmn.iterators.epochs import EpochIterator
from torchmn.iterators.order import Order
from torchmn.other_spellings import other_spellings


@other_spellings
def create_synchronized_iterator(dataloader: DataLoader[Any], comm: Communicator) -> SynchronizedIterator:
    """Returns an iterable over this rank's loader, in an order that all ranks share; all ranks must call.

    Ranks communicate in this call only: they share rank 0's random state and compare the order that follows from it.
    If rank 0's loader has a `generator`, the order is the one that the loader would have; otherwise it is drawn from a
    new seed from rank 0's random state (every rank draws one).

    Args:
        dataloader: the same data set, batch size and sampler on every rank; it is not changed. Without shuffling, the
            order is that of the loader.
        comm: communicator whose ranks iterate.

    Returns:
        The iterable; each `iter` of it is one pass over the loader.

    Raises:
        ArgumentError: on every rank, for a loader whose order cannot be reproduced.
        MismatchError: on every rank, if items, batches or order differ between ranks.
    """
    comm = as_communicator(comm, "create_synchronized_iterator")
    comm.agree("create_synchronized_iterator", orders.problem(dataloader))
    generator, state = torch.Generator(), None
    if comm.rank == 0 and dataloader.generator is not None and dataloader.generator.device == generator.device:
        state = dataloader.generator.get_state()
    state = comm.bcast_obj(state, 0)
    if state is None:
        generator.manual_seed(draw_seed(comm))
    else:
        generator.set_state(state)
    loader, order = orders.loader_in_order(dataloader, generator)
    comm.agree("create_synchronized_iterator", items=_items(loader), batches=len(order), order=order.digest())
    return SynchronizedIterator(loader, order, comm)


class SynchronizedIterator(EpochIterator):
    """A loader's batches in an order that all ranks share; made by `create_synchronized_iterator`.

    If iteration over an epoch ends early, the next iteration starts the next epoch. See `EpochIterator`.
    """

    def __init__(self, loader: DataLoader, order: Order, comm: Communicator) -> None:
        super().__init__()
        self.loader = loader
        self.comm = comm
        self._order = order
        self._iterations = 0

    def __len__(self) -> int:
        return len(self._order)

    def _restart(self) -> None:
        if self._order.following is not None:
            self._order.start, self._order.following = self._order.following, None

    def _one_epoch(self) -> Iterator[Any]:
        # After load_state_dict, `position` may be positive, but the epoch is not drawn yet.
        if self.position > 0 and self._order.following is not None:
            self._next_epoch()
        self._iterations += 1
        iteration = self._iterations
        seeds_workers = self.epoch == 0 or not self.loader.persistent_workers
        self._order.begin(self.position, seeds_workers)
        for batch in self.loader:
            if iteration != self._iterations:
                raise TorchMNError(
                    "synchronized iterator: expected one iteration at a time, got a request for a batch of an epoch "
                    "that is over, because a later one has begun"
                )
            self.position += 1
            yield batch
        self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Returns position and random state, ints and a tensor, the same on every rank; does not communicate."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "generator": self._order.start.clone(),
            "items": _items(self.loader),
            "batches": len(self),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the position of `state`: the rest of its epoch, then the next epochs; collective.

        Args:
            state: the same on every rank. The number of ranks may have changed since it was saved; within an epoch,
                the number of items and batches may not.
        """
        epoch, position = int(state["epoch"]), int(state["position"])
        generator: Tensor = state["generator"].clone().cpu()
        here, saved = (_items(self.loader), len(self)), (state["items"], state["batches"])
        problem = None
        if position > 0 and here != saved:
            problem = (
                f"the state was saved inside an epoch of {saved[1]} batches over {saved[0]} items; this loader has "
                f"{here[1]} batches over {here[0]} items. Resume with the same data set and batch size"
            )
        same = {"epoch": epoch, "position": position, "random state": digest_of((generator,))}
        self.comm.agree("synchronized iterator: load_state_dict", problem, **same)
        self.epoch, self.position = epoch, position
        self._order.start, self._order.following = generator, None
        self._iterations += 1
        self._batches = None

    def _next_epoch(self) -> None:
        assert self._order.following is not None, "an epoch ends after its order was drawn"
        self.epoch, self.position = self.epoch + 1, 0
        self._order.start = self._order.following


def _items(loader: DataLoader) -> int | None:
    """Returns the length of the loader's data set; None if it has none, with a custom sampler."""
    dataset: Any = loader.dataset
    return len(dataset) if hasattr(dataset, "__len__") else None
