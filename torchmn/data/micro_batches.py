"""A serial run's batches, dealt out along the data axis of a grid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.communicators.process_grid import ProcessGrid, checked_grid
from torchmn.data.regions import RegionDataset
from torchmn.geometry import owned


class MicroBatches:
    """This rank's part of each batch of a serial run: a batch sampler for a `DataLoader`.

    batches: the serial run's batch sampler, or a list of lists of indices: the same on every rank, so its generator
        must have the same seed
    grid: replica d along `data` gets the d-th part of each batch, balanced, larger parts first; all tiles of an image
        are then in the same micro-batch

        tiles = scatter_regions(images, grid, replicated=True)
        order = RandomSampler(tiles, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(tiles, batch_sampler=MicroBatches(BatchSampler(order, 64, drop_last=True), grid))

    Ranks compare the order at the start of each epoch, so each epoch is begun by all of them. An order that differs,
    or a batch with fewer items than ranks along `data`, is an error on every rank.
    """

    def __init__(self, batches: Iterable[Sequence[int]], grid: ProcessGrid | Communicator):
        self.batches = batches
        self.grid = checked_grid(grid, "MicroBatches")

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[int]]:
        replicas, replica = self.grid.sizes["data"], self.grid.place["data"]
        epoch = [[int(index) for index in batch] for batch in self.batches]
        small = [number for number, batch in enumerate(epoch) if len(batch) < replicas]
        problem = _dealt_problem(self.batches)
        if small:
            problem = (
                f"batch {small[0]} has {len(epoch[small[0]])} items, too few for {replicas} ranks along 'data'. Use "
                "drop_last=True or another batch size"
            )
        order = digest_of((repr(epoch),))
        self.grid.comm.agree("MicroBatches", problem, order_of_items=order)
        for batch in epoch:
            yield batch[owned(len(batch), replicas, replica).as_slice()]


def _dealt_problem(batches: Any) -> str | None:
    """Why a sampler's indices are not those of all samples, or None: they would be dealt out a second time."""
    sampler = batches
    while hasattr(sampler, "sampler"):
        sampler = sampler.sampler
    source = getattr(sampler, "data_source", None)
    if isinstance(source, RegionDataset) and len(source.indices) < source.global_length:
        return (
            f"expected a sampler over all samples, got one over {source}, which has only those of this rank along "
            "'data'. Use scatter_regions(..., replicated=True)"
        )
    return None
