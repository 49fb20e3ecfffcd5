"""A wide MLP whose vectors and weights are cut over two ranks with `modelpar`, and the whole MLP on one rank.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/tensor_parallel.py

MLP 4096-8192-8192-1000, forward and backward. `one rank` has one thread, and the other rank sleeps.
"""

from __future__ import annotations

import torch
from halo import forward_backward
from results import Results, arguments
from timing import alone, take_turns, two_ranks
from torch import nn

import torchmn

BATCHES = (32, 128)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 1000))


def main() -> None:
    options = arguments(__doc__, rounds=7).parse_args()
    comm = two_ranks()
    torch.manual_seed(0)
    whole, cut = mlp(), torchmn.parallelize(mlp(), comm, "modelpar")
    results = Results("batch")
    for batch in BATCHES:
        x = torch.rand(batch, 4096)
        contenders = {"TorchMN": forward_backward(cut, x), "one rank": alone(forward_backward(whole, x))}
        results.add(f"{batch} samples", take_turns(contenders, options))
    if comm.rank == 0:
        results.finish(options)


if __name__ == "__main__":
    main()
