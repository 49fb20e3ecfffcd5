"""Scattering 10,000 to 1,000,000 items, and batches of one rank's loader on all ranks, on two ranks.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/data.py

Values are seconds of CPU of rank 0, which reads the data: of one scatter, or of one batch.
  mpi4py          `MPI.COMM_WORLD.scatter` of the lists of items
  pickle          the root's part of that without communication and without tensors: reads the items as lists of floats,
                  and pickles and unpickles these
  DataLoader      the loader of rank 0 alone
  one broadcast   the loader, and one broadcast of raw mpi4py of each batch, whose shapes all ranks know
"""

from __future__ import annotations

import argparse
import gc
import pickle
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from results import Results, Work, arguments
from timing import WORLD, Times, two_ranks
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import torchmn
from torchmn.data import scatter_dataset
from torchmn.iterators import create_multi_node_iterator

COUNTS = {10_000: 5, 100_000: 3, 1_000_000: 1}  # turns
MOST_BY_MPI4PY = 100_000  # it takes several times as long
FEATURES, BATCH, BATCHES = 8, 64, 100


class Items:
    """A data set of pairs (tensor, number), which is not a table of tensors.

    The tensors are copies: mpi4py pickles the whole memory of which a tensor is a slice.
    """

    def __init__(self, count: int):
        self.values = torch.rand(count, FEATURES)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.values[index].clone(), index


def cpu_times(contenders: Mapping[str, Callable[[], object]], turns: int, work: int = 1) -> Times:
    """CPU seconds of rank 0, divided by `work`; contenders take turns."""
    times: Times = {name: [] for name in contenders}
    for turn in range(turns + (turns > 1)):
        for name, run in contenders.items():
            gc.collect()
            WORLD.Barrier()
            start = time.process_time()
            result = run()
            seconds = (time.process_time() - start) / work
            del result
            if turn or turns == 1:  # the first turn warms up
                times[name].append(seconds)
    return times


def scatter(count: int, comm: torchmn.Communicator, turns: int) -> Times:
    items = Items(count) if comm.rank == 0 else None

    def by_mpi4py() -> object:
        half = count // 2
        parts = [[items[n] for n in range(half)], [items[n] for n in range(half, count)]] if items else None
        return WORLD.scatter(parts)

    def by_pickle() -> object:
        if items is None:
            return None
        rows = items.values.numpy()
        return pickle.loads(pickle.dumps([(rows[n].tolist(), n) for n in range(count)], -1))

    contenders = {"TorchMN": lambda: scatter_dataset(items, comm), "pickle": by_pickle}
    if count <= MOST_BY_MPI4PY:
        contenders["mpi4py"] = by_mpi4py
    return cpu_times(contenders, turns)


def iterate(comm: torchmn.Communicator, options: argparse.Namespace) -> Times:
    data = TensorDataset(torch.rand(BATCH * BATCHES, 1, 28, 28), torch.randint(10, (BATCH * BATCHES,)))
    loader = DataLoader(data, BATCH)
    iterator = create_multi_node_iterator(loader if comm.rank == 0 else None, comm)
    flat = np.empty(BATCH * (28 * 28 + 1), dtype=np.float32)

    def by_hand() -> None:
        for _ in range(BATCHES) if comm.rank else []:
            WORLD.Bcast(flat)
            torch.from_numpy(flat[BATCH:].copy()).view(BATCH, 1, 28, 28)
            torch.from_numpy(flat[:BATCH].astype(np.int64))
        for x, y in loader if comm.rank == 0 else []:
            flat[:BATCH], flat[BATCH:] = y.numpy(), x.view(-1).numpy()
            WORLD.Bcast(flat)

    contenders = {
        "TorchMN": lambda: [None for _ in iterator],
        "one broadcast": by_hand,
        "DataLoader": lambda: [None for _ in loader] if comm.rank == 0 else None,
    }
    return cpu_times(contenders, 2 * options.rounds, BATCHES)


def main() -> None:
    options = arguments(__doc__, rounds=5).parse_args()
    comm = two_ranks()
    results = Results("operation")
    for count, turns in COUNTS.items():
        values = scatter(count, comm, min(turns, options.rounds))
        results.add(f"scatter {count:,} items", values, Work("scattered items", count))
    results.add(f"a batch of {BATCH} images", iterate(comm, options))
    if comm.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
