"""Model-parallel training on two ranks, side by side with raw mpi4py and with torch.distributed over gloo, in one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/model_parallel.py

(a) A tensor goes to the other rank and its gradient comes back: our `send` and `recv`, forward and backward through
autograd, beside the two raw messages. Times are microseconds for there and back. `raw/ours` is our bandwidth as a
share of raw mpi4py's; `gloo/ours` how many times faster than gloo's plain messages, without autograd, we are. `bare`
is what torch itself asks for: the two raw messages inside of the smallest autograd functions that can be written. And
`torch` is the receiver's part of that without any message: such a function and its `backward(gradient)`, each rank for
itself. The gradient can not leave before that is done, so nobody is less than this over raw.

(b) A pipeline of two equal stages beside torch.distributed.pipelining: pipeline.py says what the columns are.
"""

from __future__ import annotations

import argparse
from typing import Any

import pipeline
import side_by_side
import torch
import torch.distributed as dist
from communicators import memory
from gloo import start_gloo
from mpi4py import MPI

import torchmn
from torchmn import functions as F

KB, MB = 1 << 10, 1 << 20
RAW = MPI.COMM_WORLD


# -- (a) there and back ----------------------------------------------------------------------------------------------


def there_and_back(comm: torchmn.Communicator, nbytes: int) -> side_by_side.Contenders:
    """A tensor of `nbytes` from rank 0 to rank 1, and a gradient of its size back."""
    x = torch.zeros(nbytes // 4, requires_grad=True)
    gradient = torch.ones(nbytes // 4)
    plain = x.detach()
    anchor = torch.zeros((), requires_grad=True)

    def ours() -> None:
        if comm.rank == 0:
            x.grad = None
            F.send(x, comm, 1).backward()
        else:
            F.recv(comm, 0).backward(gradient)

    def raw() -> None:
        fresh = torch.empty_like(plain)
        if comm.rank == 0:
            RAW.Send([memory(plain), MPI.BYTE], 1)
            RAW.Recv([memory(fresh), MPI.BYTE], 1)
        else:
            RAW.Recv([memory(fresh), MPI.BYTE], 0)
            RAW.Send([memory(gradient), MPI.BYTE], 0)

    def bare() -> None:
        if comm.rank == 0:
            x.grad = None
            _BareSend.apply(x).backward()
        else:
            _BareReceive.apply(anchor, nbytes).backward(gradient)

    def gloo() -> None:
        fresh = torch.empty_like(plain)
        if comm.rank == 0:
            dist.send(plain, 1)
            dist.recv(fresh, 1)
        else:
            dist.recv(fresh, 0)
            dist.send(gradient, 0)

    def only_torch() -> None:
        _Nothing.apply(anchor, nbytes).backward(gradient)

    return {"ours": ours, "raw": raw, "bare": bare, "torch": only_torch, "gloo": gloo}


class _BareSend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        RAW.Send([memory(x), MPI.BYTE], 1)
        ctx.count = x.numel()
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        fresh = torch.empty(ctx.count)
        RAW.Recv([memory(fresh), MPI.BYTE], 1)
        return fresh


class _BareReceive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, nbytes: int) -> torch.Tensor:
        fresh = torch.empty(nbytes // 4)
        RAW.Recv([memory(fresh), MPI.BYTE], 0)
        return fresh

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        RAW.Send([memory(gradients[0]), MPI.BYTE], 0)
        return None, None


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes // 4)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
        return None, None


def messages(comm: torchmn.Communicator, rounds: int) -> str:
    """The table of part (a)."""
    rows = []
    for nbytes in (KB, 64 * KB, MB, 4 * MB):
        iterations = max(5, min(300, 32 * MB // nbytes))
        seconds = side_by_side.take_turns(there_and_back(comm, nbytes), iterations, rounds, RAW.Barrier)
        micro = {name: 1e6 * value for name, value in seconds.items()}
        rows.append(
            [side_by_side.size_text(nbytes)]
            + [f"{micro[name]:.1f}" for name in ("ours", "raw", "bare", "torch", "gloo")]
            + [f"{micro['ours'] - micro['raw']:+.1f}"]
            + [f"{micro['raw'] / micro['ours']:.2f}", f"{micro['gloo'] / micro['ours']:.1f}"]
        )
    header = ["size", "ours us", "raw us", "bare us", "torch us", "gloo us", "over raw us", "raw/ours", "gloo/ours"]
    return side_by_side.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns per contender; the median counts")
    parser.add_argument("--part", choices=("a", "b", "both"), default="both")
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = torchmn.create_communicator("mpi")
    if comm.size != 2:
        raise SystemExit(
            "benchmarks/model_parallel.py runs on 2 ranks: mpiexec -n 2 python benchmarks/model_parallel.py"
        )
    start_gloo()
    if comm.rank == 0:
        print(side_by_side.environment(MPI.Get_library_version().splitlines()[0].replace("\t", " ").strip()))
    parts = {"a": ("a tensor there and its gradient back", messages), "b": ("a pipeline of two stages", pipeline.table)}
    for name, (title, table) in parts.items():
        if options.part in (name, "both"):
            text = table(comm, options.rounds)
            if comm.rank == 0:
                print(f"({name}) {title}\n{text}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
