"""A wide MLP with its vectors cut over two ranks beside the whole on one.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/vector.py

MLP 4096-8192-8192-1000, batch 32, forward and backward; `one` is one rank with one thread, the other asleep.
"""

from __future__ import annotations

import argparse

import side_by_side
import torch
from halo import WORLD, pass_through
from torch import nn

import torchmn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 1000))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=7)
    options = side_by_side.parsed(arguments)
    torch.set_num_threads(1)
    comm = torchmn.create_communicator("mpi")
    torch.manual_seed(0)
    x = torch.rand(32, 4096)
    model = torchmn.parallelize(mlp(), comm, "modelpar")
    contenders = {"ours": pass_through(model, x), "one": side_by_side.alone(pass_through(mlp(), x))}
    seconds = side_by_side.take_turns(contenders, iterations=1, rounds=options.rounds, barrier=WORLD.Barrier)
    longest = {name: comm.allreduce(torch.tensor(value), "max").item() for name, value in seconds.items()}
    side_by_side.keep("MLP 4096-8192-8192-1000", longest["ours"])
    held = sum(p.numel() for p in model.parameters()) / sum(p.numel() for p in mlp().parameters())
    if comm.rank == 0:
        print(side_by_side.environment(f"{comm.size} ranks x 1 thread"))
        header = ["MLP 4096-8192-8192-1000", "one ms", "ours ms", "x one", "parameters per rank"]
        row = ["batch 32", *(f"{longest[name] * 1e3:.1f}" for name in ("one", "ours"))]
        print(side_by_side.table(header, [[*row, f"{longest['one'] / longest['ours']:.2f}", f"{held:.2f}"]]))
    side_by_side.write_json(options.json, comm.rank)


if __name__ == "__main__":
    main()
