"""The order in which a `DataLoader` asks for items, drawn from a generator of our own."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from torchmn._torch_compat import copied_loader
from torchmn.communicators.messages.digest import digest_of


class Order:
    """A loader's batches of indices, epoch by epoch: what the loader iterates over in place of its own sampler.

    sampler: gives one epoch's batches, and draws from `generator` only
    start: the generator's state when the current epoch begins
    following: its state when the next one begins; None until the epoch was drawn
    worker_seeds: what the loader seeds its workers from. It is apart from `generator`, because a loader whose
        workers persist seeds them once, and one that is resumed seeds them again
    """

    def __init__(self, sampler: Any, generator: torch.Generator) -> None:
        self.sampler = sampler
        self.generator = generator
        self.start = generator.get_state()
        self.following: Tensor | None = None
        self.worker_seeds = torch.Generator()
        self._skipped = 0
        self._seeds_workers = True

    def begin(self, skipped: int, seeds_workers: bool = True) -> None:
        """Prepare to draw the epoch that begins at `start`, of which the first `skipped` batches are left out.

        seeds_workers: the loader whose order this is would draw a seed for its workers before it draws its order
        """
        self.following = None
        self.worker_seeds.set_state(self.start)
        self._skipped, self._seeds_workers = skipped, seeds_workers

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # The whole epoch at once, as torch's own samplers draw it: the generator is then where the next epoch
        # begins, however far ahead worker processes read and wherever this epoch is left.
        self.generator.set_state(self.start)
        if self._seeds_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        batches = list(self.sampler)
        self.following = self.generator.get_state()
        yield from islice(batches, self._skipped, None)

    def digest(self) -> str:
        """A short text that is the same on ranks whose samplers draw the same batches."""
        self.begin(0)
        digest = digest_of(repr(batch) for batch in self)
        self.following = None
        return digest


def loader_in_order(loader: DataLoader, generator: torch.Generator) -> tuple[DataLoader, Order]:
    """A loader like `loader` whose order is drawn from `generator`, and that order. `loader` stays as it is."""
    batched = loader.batch_sampler is not None
    order = Order(_drawing_from(loader.batch_sampler if batched else loader.sampler, generator), generator)
    # Copying keeps what else a loader, or a class derived from it, may have.
    ours = copied_loader(loader, **{"batch_sampler" if batched else "sampler": order})
    ours.generator = order.worker_seeds
    return ours, order


def problem(loader: object) -> str | None:
    """Why the order of `loader` can not be drawn from a generator of ours, or None."""
    if not isinstance(loader, DataLoader):
        return f"expected a torch.utils.data.DataLoader, got {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"expected a map-style data set, got {type(loader.dataset).__name__}, which decides its order itself: let "
            "one rank read it (torchmn.iterators.create_multi_node_iterator)"
        )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        return "expected in_order=True, because worker processes that overtake each other have no common order"
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    try:
        len(sampler)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        return f"expected a sampler with a length, got {type(sampler).__name__}: {error}"
    return _sampler_problem(sampler)


def _sampler_problem(sampler: Any) -> str | None:
    if _is_fixed(sampler) or hasattr(sampler, "generator"):
        return None
    if hasattr(sampler, "sampler"):
        return _sampler_problem(sampler.sampler)
    return (
        f"expected a sampler whose random numbers come from its attribute `generator`, as torch's samplers have it, "
        f"got {type(sampler).__name__}: give it one (None, if it draws no random numbers)"
    )


def _drawing_from(sampler: Any, generator: torch.Generator) -> Any:
    """A copy of `sampler` that draws from `generator`."""
    if _is_fixed(sampler):
        return sampler
    ours = copy(sampler)
    if hasattr(ours, "sampler"):
        ours.sampler = _drawing_from(ours.sampler, generator)
    if hasattr(ours, "generator"):
        ours.generator = generator
    return ours


def _is_fixed(sampler: Any) -> bool:
    """Whether `sampler` gives the same indices in every epoch."""
    return type(sampler) is SequentialSampler or isinstance(sampler, list | tuple | range | Tensor)
