"""Every rank's own batches, in the same order on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.data.seeds import draw_seed
from torchmn.errors import TorchMNError
from torchmn.iterators import order as orders
from torchmn.iterators.order import Order


def create_synchronized_iterator(dataloader: DataLoader, comm: Communicator) -> SynchronizedIterator:
    """An iterable over this rank's loader that asks for the same indices in the same order on every rank.

    Every rank calls it, with loaders alike: the same data set, batch size and sampler. Ranks meet here, to agree on
    rank 0's random state and to compare what order it leads to, and not again: no batch costs a message.
    `shuffle=False` stays unshuffled. The loader itself is left alone: the order comes from a copy of rank 0's
    `generator`, if its loader has one, and is then the order that the loader would have given; otherwise from a seed
    that is drawn from rank 0's random state (every rank draws one), a new one for each iterator.
    """
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
    said = {"items": _items(loader), "batches": len(order), "order": order.digest()}
    comm.agree("create_synchronized_iterator", **said)
    return SynchronizedIterator(loader, order, comm)


class SynchronizedIterator:
    """A loader's batches in an order that all ranks share. Made by `create_synchronized_iterator`.

    `epoch` counts epochs, `position` the batches of the current one that were given out. An epoch that is left
    before its end is over: the next `for` begins the next one.
    """

    def __init__(self, loader: DataLoader, order: Order, comm: Communicator) -> None:
        self.loader = loader
        self.comm = comm
        self.epoch = 0
        self.position = 0
        self._order = order
        self._begun = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        """One epoch; after `load_state_dict`, the rest of the epoch that was saved."""
        # A state that was loaded has a position, but nothing of its epoch was drawn yet.
        if self.position > 0 and self._order.following is not None:
            self._next_epoch()
        self._begun += 1
        begun = self._begun
        seeds_workers = self.epoch == 0 or not self.loader.persistent_workers
        self._order.begin(self.position, seeds_workers)
        for batch in self.loader:
            if begun != self._begun:
                raise TorchMNError(
                    "a synchronized iterator was asked for a batch of an epoch that is over, because a later one has "
                    "begun: iterate over it once at a time"
                )
            self.position += 1
            yield batch
        self._next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Position and random state, the same on every rank: ints and a tensor. No rank waits for another."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "generator": self._order.start.clone(),
            "items": _items(self.loader),
            "batches": len(self),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the iterator that saved `state` stood: the rest of its epoch, then its next epochs.

        Every rank calls it, with the same state (collective). The number of ranks may be another one than when
        it was saved; within an epoch, items and batches may not.
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
        random_state = digest_of((generator,))
        said = {"epoch": epoch, "position": position, "random state": random_state}
        self.comm.agree("synchronized iterator: load_state_dict", problem, **said)
        self.epoch, self.position = epoch, position
        self._order.start, self._order.following = generator, None
        self._begun += 1

    def _next_epoch(self) -> None:
        assert self._order.following is not None, "an epoch ends after its order was drawn"
        self.epoch, self.position = self.epoch + 1, 0
        self._order.start = self._order.following


def _items(loader: DataLoader) -> int | None:
    """Length of the loader's data set, if it has one: a custom sampler may do without."""
    dataset: Any = loader.dataset
    return len(dataset) if hasattr(dataset, "__len__") else None
