"""Communication on two ranks: TorchMN, raw mpi4py, and torch.distributed over gloo.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/communicators.py

Times are per operation; a send/recv is half a round trip. Raw mpi4py receives into a new tensor, as TorchMN must.
`TorchMN unchecked` does not compare the arguments of ranks. `mean of gradients` is `multi_node_mean_grad` of an MLP
784-1000-1000-10 (7 MB in 6 tensors) beside one raw in-place all-reduce of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from gloo import start_gloo
from mnist_nets import mlp
from mpi4py import MPI
from results import Results, arguments
from timing import Contenders, size_text, take_turns, two_ranks

import torchmn

KB, MB = 1 << 10, 1 << 20
SIZES = (KB, 64 * KB, MB, 4 * MB, 16 * MB, 64 * MB)
RAW = MPI.COMM_WORLD


def memory(x: torch.Tensor) -> MPI.memory:
    """The memory of a tensor that the caller keeps alive."""
    return MPI.memory.fromaddress(x.data_ptr(), x.nbytes)


def without_checks(comm: torchmn.Communicator) -> torchmn.Communicator:
    """A communicator of the same ranks that does not compare their arguments."""
    unchecked = comm.split(0, comm.rank)
    assert unchecked is not None
    unchecked.settings.checks = False
    return unchecked


def send_recv(comm: torchmn.Communicator, unchecked: torchmn.Communicator, x: torch.Tensor) -> Contenders:
    peer = 1 - comm.rank

    def round_trip(send: Callable[[], object], receive: Callable[[], object]) -> Callable[[], None]:
        first, second = (send, receive) if comm.rank == 0 else (receive, send)

        def run() -> None:
            first()
            second()

        return run

    def raw_receive() -> None:
        received = torch.empty_like(x)
        RAW.Recv([memory(received), MPI.BYTE], peer)

    return {
        "TorchMN": round_trip(lambda: comm.send(x, peer), lambda: comm.recv(peer)),
        "raw mpi4py": round_trip(lambda: RAW.Send([memory(x), MPI.BYTE], peer), raw_receive),
        "gloo": round_trip(lambda: dist.send(x, peer), lambda: dist.recv(torch.empty_like(x), peer)),
    }


def bcast(comm: torchmn.Communicator, unchecked: torchmn.Communicator, x: torch.Tensor) -> Contenders:
    """One broadcast from each rank, so that no rank runs ahead."""

    def from_each_rank(broadcast: Callable[[int], object]) -> Callable[[], None]:
        def run() -> None:
            broadcast(0)
            broadcast(1)

        return run

    def raw(root: int) -> None:
        received = x if root == comm.rank else torch.empty_like(x)
        RAW.Bcast([memory(received), MPI.BYTE], root)

    return {
        "TorchMN": from_each_rank(lambda root: comm.bcast(x if root == comm.rank else None, root)),
        "TorchMN unchecked": from_each_rank(lambda root: unchecked.bcast(x if root == comm.rank else None, root)),
        "raw mpi4py": from_each_rank(raw),
        "gloo": from_each_rank(lambda root: dist.broadcast(x if root == comm.rank else torch.empty_like(x), root)),
    }


def allreduce(comm: torchmn.Communicator, unchecked: torchmn.Communicator, x: torch.Tensor) -> Contenders:
    def raw() -> None:
        received = torch.empty_like(x)
        RAW.Allreduce([memory(x), MPI.FLOAT], [memory(received), MPI.FLOAT])

    return {
        "TorchMN": lambda: comm.allreduce(x),
        "TorchMN unchecked": lambda: unchecked.allreduce(x),
        "raw mpi4py": raw,
        "gloo": lambda: dist.all_reduce(x.clone()),
    }


def allreduce_in_place(comm: torchmn.Communicator, unchecked: torchmn.Communicator, x: torch.Tensor) -> Contenders:
    return {
        "TorchMN": lambda: comm.allreduce(x, in_place=True),
        "TorchMN unchecked": lambda: unchecked.allreduce(x, in_place=True),
        "raw mpi4py": lambda: RAW.Allreduce(MPI.IN_PLACE, [memory(x), MPI.FLOAT]),
        "gloo": lambda: dist.all_reduce(x),
    }


OPERATIONS = {  # the function, and how many operations it runs
    "send/recv": (send_recv, 2),
    "bcast": (bcast, 2),
    "allreduce": (allreduce, 1),
    "allreduce in place": (allreduce_in_place, 1),
}


def mean_of_gradients(comm: torchmn.Communicator) -> Contenders:
    model = mlp()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    return {
        "TorchMN": lambda: comm.multi_node_mean_grad(model),
        "raw mpi4py": lambda: RAW.Allreduce(MPI.IN_PLACE, [memory(flat), MPI.FLOAT]),
    }


def main() -> None:
    options = arguments(__doc__, rounds=11).parse_args()
    comm = two_ranks()
    start_gloo()
    unchecked = without_checks(comm)
    results = Results("operation")
    for name, (operation, count) in OPERATIONS.items():
        for nbytes in SIZES:
            contenders = operation(comm, unchecked, torch.zeros(nbytes // 4))
            times = take_turns(contenders, options, iterations=max(2, min(500, 16 * MB // nbytes)))
            results.add(
                f"{name}, {size_text(nbytes)}",
                {contender: [seconds / count for seconds in turns] for contender, turns in times.items()},
            )
    results.add("mean of gradients, 7 MB", take_turns(mean_of_gradients(comm), options, iterations=10, factor=3))
    if comm.rank == 0:
        results.finish(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
