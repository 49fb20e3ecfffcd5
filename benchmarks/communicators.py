"""Our communicator beside raw mpi4py and beside torch.distributed over gloo, on two ranks, in one run.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/communicators.py

Raw mpi4py receives into a fresh tensor, as ours must. Times are microseconds per operation (a send/recv is half
a round trip). `raw/ours` is our bandwidth as a share of raw mpi4py's; `gloo/ours` how many times faster than gloo.
"""

from __future__ import annotations

import argparse

import side_by_side
import torch
import torch.distributed as dist
from gloo import start_gloo
from mpi4py import MPI
from torch import nn

import torchmn

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
RAW = MPI.COMM_WORLD


def memory(x: torch.Tensor) -> MPI.memory:
    """The memory of a tensor that the caller keeps alive."""
    return MPI.memory.fromaddress(x.data_ptr(), x.nbytes)


def unchecked(comm: torchmn.Communicator) -> torchmn.Communicator:
    """The same communicator with the collective argument checks off."""
    plain = comm.split(0, comm.rank)
    assert plain is not None
    plain.settings.checks = False
    return plain


def send_recv(comm: torchmn.Communicator, plain: torchmn.Communicator, x: torch.Tensor) -> side_by_side.Contenders:
    peer = 1 - comm.rank
    first = comm.rank == 0

    def ours() -> None:
        if first:
            comm.send(x, peer)
            comm.recv(peer)
        else:
            comm.recv(peer)
            comm.send(x, peer)

    def raw_receive() -> None:
        fresh = torch.empty_like(x)
        RAW.Recv([memory(fresh), MPI.BYTE], peer)

    def raw() -> None:
        if first:
            RAW.Send([memory(x), MPI.BYTE], peer)
            raw_receive()
        else:
            raw_receive()
            RAW.Send([memory(x), MPI.BYTE], peer)

    def gloo() -> None:
        if first:
            dist.send(x, peer)
            dist.recv(torch.empty_like(x), peer)
        else:
            dist.recv(torch.empty_like(x), peer)
            dist.send(x, peer)

    return {"ours": ours, "raw": raw, "gloo": gloo}


def bcast(comm: torchmn.Communicator, plain: torchmn.Communicator, x: torch.Tensor) -> side_by_side.Contenders:
    """One broadcast from each rank, so that no rank runs ahead."""

    def with_communicator(which: torchmn.Communicator) -> None:
        for root in range(2):
            which.bcast(x if root == comm.rank else None, root)

    def raw() -> None:
        for root in range(2):
            fresh = x if root == comm.rank else torch.empty_like(x)
            RAW.Bcast([memory(fresh), MPI.BYTE], root)

    def gloo() -> None:
        for root in range(2):
            dist.broadcast(x if root == comm.rank else torch.empty_like(x), root)

    return {
        "ours": lambda: with_communicator(comm),
        "unchecked": lambda: with_communicator(plain),
        "raw": raw,
        "gloo": gloo,
    }


def allreduce(comm: torchmn.Communicator, plain: torchmn.Communicator, x: torch.Tensor) -> side_by_side.Contenders:
    def raw() -> None:
        fresh = torch.empty_like(x)
        RAW.Allreduce([memory(x), MPI.FLOAT], [memory(fresh), MPI.FLOAT])

    return {
        "ours": lambda: comm.allreduce(x),
        "unchecked": lambda: plain.allreduce(x),
        "raw": raw,
        "gloo": lambda: dist.all_reduce(x.clone()),
    }


def allreduce_in_place(
    comm: torchmn.Communicator, plain: torchmn.Communicator, x: torch.Tensor
) -> side_by_side.Contenders:
    x = torch.zeros_like(x)
    return {
        "ours": lambda: comm.allreduce(x, in_place=True),
        "unchecked": lambda: plain.allreduce(x, in_place=True),
        "raw": lambda: RAW.Allreduce(MPI.IN_PLACE, [memory(x), MPI.FLOAT]),
        "gloo": lambda: dist.all_reduce(x),
    }


def operations(comm: torchmn.Communicator, plain: torchmn.Communicator, rounds: int) -> list[list[str]]:
    rows = []
    halves = {send_recv: 2, bcast: 2}
    for operation in (send_recv, bcast, allreduce, allreduce_in_place):
        for nbytes in SIZES:
            x = torch.zeros(nbytes // 4)
            iterations = max(2, min(500, 16 * MB // nbytes))
            contenders = operation(comm, plain, x)
            seconds = side_by_side.take_turns(contenders, iterations, rounds, RAW.Barrier)
            micro = {name: 1e6 * value / halves.get(operation, 1) for name, value in seconds.items()}
            for name in ("ours", "unchecked"):
                if name in micro:
                    side_by_side.keep(
                        f"{operation.__name__}, {side_by_side.size_text(nbytes)}, {name}", 1e-6 * micro[name]
                    )
            rows.append(
                [operation.__name__, side_by_side.size_text(nbytes)]
                + [f"{micro[name]:.1f}" if name in micro else "-" for name in ("ours", "unchecked", "raw", "gloo")]
                + [f"{micro['raw'] / micro['ours']:.2f}", f"{micro['gloo'] / micro['ours']:.1f}"]
                + [f"{micro['ours'] - micro['raw']:+.1f}"]
            )
    return rows


def mean_grad(comm: torchmn.Communicator, rounds: int) -> str:
    """multi_node_mean_grad of an MLP 784-1000-1000-10 (7 MB, 6 tensors) beside one raw all-reduce of its bytes."""
    model = nn.Sequential(nn.Linear(784, 1000), nn.Linear(1000, 1000), nn.Linear(1000, 10))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    seconds = side_by_side.take_turns(
        {
            "ours": lambda: comm.multi_node_mean_grad(model),
            "raw": lambda: RAW.Allreduce(MPI.IN_PLACE, [memory(flat), MPI.FLOAT]),
        },
        iterations=10,
        rounds=3 * rounds,
        barrier=RAW.Barrier,
    )
    side_by_side.keep("multi_node_mean_grad, 7 MB", seconds["ours"])
    return (
        f"multi_node_mean_grad, {flat.nbytes / 1e6:.1f} MB in 6 tensors: {1e3 * seconds['ours']:.2f} ms, one raw "
        f"in-place all-reduce {1e3 * seconds['raw']:.2f} ms: {seconds['ours'] / seconds['raw']:.2f} times as long"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns per contender; the median counts")
    options = side_by_side.parsed(parser)
    rounds = options.rounds
    torch.set_num_threads(1)
    comm = torchmn.create_communicator("mpi")
    if comm.size != 2:
        raise SystemExit("benchmarks/communicators.py runs on 2 ranks: mpiexec -n 2 python benchmarks/communicators.py")
    start_gloo()
    plain = unchecked(comm)
    rows = operations(comm, plain, rounds)
    summary = mean_grad(comm, rounds)
    if comm.rank == 0:
        print(side_by_side.environment(MPI.Get_library_version().splitlines()[0].replace("\t", " ").strip()))
        header = [
            "operation",
            "size",
            "ours us",
            "unchecked us",
            "raw us",
            "gloo us",
            "raw/ours",
            "gloo/ours",
            "over raw us",
        ]
        print(side_by_side.table(header, rows))
        print(summary)
    side_by_side.write_json(options.json, comm.rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
