"""Model-parallel training on two ranks, side by side with raw mpi4py and with torch.distributed over gloo, in one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/model_parallel.py

(a) A tensor goes to the other rank and its gradient comes back, by our `send` and `recv`, forward and backward through
autograd, beside the two raw messages: there_and_back.py says what the columns are.

(b) A pipeline of two equal stages beside torch.distributed.pipelining: pipeline.py says what the columns are.
"""

from __future__ import annotations

import argparse

import pipeline
import side_by_side
import there_and_back
import torch
import torch.distributed as dist
from gloo import start_gloo
from mpi4py import MPI

import torchmn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns per contender; the median counts")
    parser.add_argument("--part", choices=("a", "b", "both"), default="both")
    options = side_by_side.parsed(parser)
    torch.set_num_threads(1)
    comm = torchmn.create_communicator("mpi")
    if comm.size != 2:
        raise SystemExit(
            "benchmarks/model_parallel.py runs on 2 ranks: mpiexec -n 2 python benchmarks/model_parallel.py"
        )
    start_gloo()
    if comm.rank == 0:
        print(side_by_side.environment(MPI.Get_library_version().splitlines()[0].replace("\t", " ").strip()))
    parts = {
        "a": ("a tensor there and its gradient back", there_and_back.table),
        "b": ("a pipeline of two stages", pipeline.table),
    }
    for name, (title, table) in parts.items():
        if options.part in (name, "both"):
            text = table(comm, options.rounds)
            if comm.rank == 0:
                print(f"({name}) {title}\n{text}", flush=True)
    side_by_side.write_json(options.json, comm.rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
