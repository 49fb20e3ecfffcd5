"""A `DataLoader` whose order of items is drawn from a given random generator, and can be resumed within an epoch."""

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
    """A loader's batches of indices, epoch by epoch; replaces the sampler of the loader.

    Attributes:
        sampler: yields the batches of one epoch, and draws from `generator` only.
        generator: the random generator.
        start: state of the generator at the start of the current epoch.
        following: its state at the start of the next epoch; None until the epoch is drawn.
        worker_seeds: the generator from which the loader seeds its workers. It is not `generator`, because persistent
            workers are seeded once, and those of a resumed loader again.
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
        """Prepares to draw the epoch that begins at `start`.

        Args:
            skipped: number of batches to leave out at the start of the epoch.
            seeds_workers: the original loader would draw a seed for its workers before the order.
        """
        self.following = None
        self.worker_seeds.set_state(self.start)
        self._skipped, self._seeds_workers = skipped, seeds_workers

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        # The whole epoch at once, as torch's samplers draw it: the generator is then in the state for the next epoch,
        # regardless of how far workers prefetch and where iteration over this epoch ends.
        self.generator.set_state(self.start)
        if self._seeds_workers:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        batches = list(self.sampler)
        self.following = self.generator.get_state()
        yield from islice(batches, self._skipped, None)

    def digest(self) -> str:
        """Returns a short text that is equal on ranks whose samplers draw the same batches."""
        self.begin(0)
        digest = digest_of(repr(batch) for batch in self)
        self.following = None
        return digest


def loader_in_order(loader: DataLoader, generator: torch.Generator) -> tuple[DataLoader, Order]:
    """Returns a copy of `loader` whose order is drawn from `generator`, and that order."""
    batched = loader.batch_sampler is not None
    order = Order(_drawing_from(loader.batch_sampler if batched else loader.sampler, generator), generator)
    # Copied rather than constructed, to keep the attributes of derived classes.
    ordered = copied_loader(loader, **{"batch_sampler" if batched else "sampler": order})
    ordered.generator = order.worker_seeds
    return ordered, order


def problem(loader: object) -> str | None:
    """Returns why the order of `loader` cannot be drawn from another generator, or None."""
    if not isinstance(loader, DataLoader):
        return f"expected a torch.utils.data.DataLoader, got {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"expected a map-style data set, got {type(loader.dataset).__name__}, an iterable one, whose order is "
            "its own: give each rank its part (torchmn.scatter_dataset), or let one rank read it "
            "(torchmn.iterators.create_multi_node_iterator)"
        )
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):
        return "expected in_order=True: otherwise the order of batches depends on the speed of worker processes"
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    try:
        len(sampler)
    except (TypeError, NotImplementedError) as error:
        return f"expected a sampler with a length, got {type(sampler).__name__}: {error}"
    return _sampler_problem(sampler)


def _sampler_problem(sampler: Any) -> str | None:
    if _is_fixed(sampler) or hasattr(sampler, "generator"):
        return None
    if hasattr(sampler, "sampler"):
        return _sampler_problem(sampler.sampler)
    return (
        f"expected a sampler whose random numbers come from its attribute `generator`, as in torch's samplers, got "
        f"{type(sampler).__name__}: give it that attribute (None, if it draws no random numbers)"
    )


def _drawing_from(sampler: Any, generator: torch.Generator) -> Any:
    """Returns a copy of `sampler` that draws from `generator`."""
    if _is_fixed(sampler):
        return sampler
    duplicate = copy(sampler)
    if hasattr(duplicate, "sampler"):
        duplicate.sampler = _drawing_from(duplicate.sampler, generator)
    if hasattr(duplicate, "generator"):
        duplicate.generator = generator
    return duplicate


def _is_fixed(sampler: Any) -> bool:
    """Returns whether `sampler` has the same indices in every epoch."""
    return type(sampler) is SequentialSampler or isinstance(sampler, list | tuple | range | Tensor)
