"""`MicroBatches`: a batch sampler that splits the batches of a serial run along the `data` axis of a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torchmn.communicators.communicator import Communicator
from torchmn.communicators.messages.digest import digest_of
from torchmn.communicators.process_grid import ProcessGrid, checked_grid
from torchmn.data.regions import RegionDataset
from torchmn.geometry import owned


class BatchSource(Protocol):
    """Batches of indices: a `BatchSampler`, or a list of lists."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence[int]]: ...


class MicroBatches:
    """This rank's part of each batch of a serial run: a batch sampler for a `DataLoader`.

        tiles = scatter_regions(images, grid, replicated=True)
        order = RandomSampler(tiles, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(tiles, batch_sampler=MicroBatches(BatchSampler(order, 64, drop_last=True), grid))

    All ranks must start each epoch together, because they compare the order at its start.

    Args:
        batches: the batch sampler of the serial run, or a list of lists of indices; the same on every rank, so its
            generator must have the same seed.
        grid: the process grid. Replica d along `data` gets the d-th part of each batch, balanced, larger parts first;
            all tiles of an image are in the same micro-batch.

    Raises:
        ArgumentError: on every rank, when iterated, for a batch with fewer items than ranks along `data`.
        MismatchError: on every rank, when iterated, if the order differs between ranks.
    """

    def __init__(self, batches: BatchSource, grid: ProcessGrid | Communicator):
        self.batches = batches
        self.grid = checked_grid(grid, "MicroBatches")

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        replicas, replica = self.grid.sizes["data"], self.grid.place["data"]
        epoch = [[int(index) for index in batch] for batch in self.batches]
        small = [number for number, batch in enumerate(epoch) if len(batch) < replicas]
        problem = _sampler_problem(self.batches)
        if small:
            problem = (
                f"batch {small[0]} has {len(epoch[small[0]])} items, too few for {replicas} ranks along 'data'. Use "
                "drop_last=True or another batch size"
            )
        order = digest_of((repr(epoch),))
        self.grid.comm.agree("MicroBatches", problem, order_of_items=order)
        for batch in epoch:
            yield batch[owned(len(batch), replicas, replica).as_slice()]


def _sampler_problem(batches: Any) -> str | None:
    """Returns an error message if the sampler covers one replica's samples only, which would be split again."""
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
