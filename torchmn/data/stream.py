"""`ScatteredStream`: one rank's part of an iterable data set, by position, and the comparison of streams over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.watchdog.report import ranks_text
from torchmn.data.digest import digest
from torchmn.data.same_data import COMPARED, copy_for_reading, seeded_generators
from torchmn.data.scattered import record_repeated_item
from torchmn.errors import ArgumentError, MismatchError


class ScatteredStream(IterableDataset[Any]):
    """One rank's part of an iterable data set, itself an iterable data set; made by `scatter_dataset`.

    Rank r of n gets the items r, r + n, r + 2n, ...; so the first batches of all ranks together are the first items.
    Each rank iterates over the whole stream, and skips the items of others; iterating does not communicate.

    Args:
        source: the whole stream.
        rank: the rank whose part it is.
        size: number of ranks.
        repeated: see the attribute.

    Attributes:
        source: the whole stream.
        rank: the rank whose part it is.
        size: number of ranks.
        repeated: 1 if ranks without an item at the end get one that another rank has as well, so that all ranks have
            equally many; 0 if every item is on exactly one rank.
        global_length: number of items in the whole stream, which is known after an iteration to its end in this
            process; None before.
    """

    def __init__(self, source: IterableDataset[Any], rank: int, size: int, repeated: int) -> None:
        self.source, self.rank, self.size, self.repeated = source, rank, size, repeated
        self.global_length: int | None = None

    def unique(self) -> ScatteredStream:
        """Returns this part without a repeated item: on all ranks together, every item exactly once."""
        return ScatteredStream(self.source, self.rank, self.size, 0)

    def __len__(self) -> int:
        if not isinstance(self.source, Sized):
            raise TypeError(f"{self} has no length")
        items, more = divmod(len(self.source), self.size)
        return items + (more > 0 and (self.repeated > 0 or self.rank < more))

    def __iter__(self) -> Iterator[Any]:
        workers = get_worker_info()
        if workers is not None and workers.num_workers > 1:
            raise ArgumentError(
                f"{self}: expected at most one worker in a DataLoader, got {workers.num_workers}: ranks divide a "
                "stream by the positions of its items, which several workers would change. Use num_workers=1"
            )
        group: list[Any] = []  # one item of each rank
        length = 0
        for item in self.source:
            group.append(item)
            length += 1
            if len(group) == self.size:
                yield group[self.rank]
                group = []
        self.global_length = length
        if self.rank < len(group):
            yield group[self.rank]
        elif group and self.repeated:
            record_repeated_item(self)
            yield group[self.rank % len(group)]

    def __repr__(self) -> str:
        repeats = ", at most 1 repeated" if self.repeated else ""
        return f"ScatteredStream(rank {self.rank} of {self.size}{repeats}; {type(self.source).__name__})"


def compare_streams(comm: Communicator, operation: str, dataset: IterableDataset[Any], wanted: bool) -> None:
    """Compares the first items of the streams of all ranks, and skips streams that can be read only once.

    They are read with the current states of the global generators, which are restored: a stream that shuffles with
    them has another order on each rank.

    Args:
        comm: communicator whose ranks have the streams.
        operation: its name, in messages.
        dataset: this rank's stream.
        wanted: False if the user has disabled the comparison; the same on all ranks.

    Raises:
        MismatchError: on every rank, naming the first item that differs between ranks.
    """
    if not wanted or comm.size == 1:
        return
    digests = None if _is_read_once(dataset) else tuple(_first_digests(dataset))
    ranks = [found for (found,) in comm.agree(operation, differ=(digests,))]
    if None in ranks:
        return
    for index in range(max(map(len, ranks))):
        groups: dict[str | None, list[int]] = {}
        for rank, found in enumerate(ranks):
            groups.setdefault(found[index] if index < len(found) else None, []).append(rank)
        if len(groups) > 1:
            who = "; ".join(f"rank {ranks_text(group)}" for group in groups.values())
            raise MismatchError(
                f"rank {comm.rank} of {comm.size}: {operation}: ranks have streams with other items or in another "
                f"order: item {index} differs between {who}. Every rank must iterate over the whole stream, in the "
                "same order: shuffle with a generator that is seeded equally on all ranks; a stream of which each rank "
                "reads a part already is not scattered. If the items are the same although they look different (random "
                "augmentation): compare_items=False."
            )


def _first_digests(dataset: IterableDataset[Any]) -> Iterator[str]:
    with seeded_generators(None):
        try:
            for item in islice(copy_for_reading(dataset), COMPARED):
                yield digest(item)
        except Exception as error:  # a user's data set may raise anything; on all ranks, that is no difference
            yield digest(f"raised {type(error).__name__}")


def _is_read_once(dataset: IterableDataset[Any]) -> bool:
    """Returns whether reading an item would take it from the stream: from a file or generator in an attribute."""
    return isinstance(dataset, Iterator) or any(isinstance(value, Iterator) for value in vars(dataset).values())
