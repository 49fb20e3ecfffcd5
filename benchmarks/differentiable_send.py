"""A tensor goes from rank 0 to rank 1 and its gradient comes back: what does autograd across ranks cost?

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/differentiable_send.py

  TorchMN        `functions.send` and `functions.recv`, forward and backward
  raw mpi4py     two messages without autograd
  gloo           two messages of torch.distributed without autograd
  hand-written   two autograd functions around mpi4py, each of which sends a header with dtype and shape, then the data
  autograd only  the receiver's autograd function and its `backward(gradient)` without any message: the gradient cannot
                 leave before this is done
  copies only    copies into shared memory and out of it, without messages, checks and autograd

`1 MB, used`: values are written before they are sent and read after they are received, as in a model. `16 x 1 KB`: 16
tensors are sent one after the other, and each rank calls backward once for all; times are per tensor.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from communicators import KB, MB, RAW, memory
from gloo import start_gloo
from mpi4py import MPI
from results import Results, arguments
from timing import Contenders, size_text, take_turns, two_ranks

import torchmn
from torchmn import functions as F

EDGES = 16
TURNS_PER_ROUND = 10  # short turns, and many: the speed of a shared machine changes several times a second
PAGE = 4096


def one_tensor(comm: torchmn.Communicator, nbytes: int) -> Contenders:
    """A tensor of `nbytes` from rank 0 to rank 1, and a gradient of the same size back."""
    x = torch.zeros(nbytes // 4, requires_grad=True)
    plain, gradient = x.detach(), torch.ones(nbytes // 4)
    anchor = torch.zeros((), requires_grad=True)

    def ours() -> None:
        if comm.rank == 0:
            x.grad = None
            F.send(x, comm, 1).backward()
        else:
            F.recv(comm, 0).backward(gradient)

    def raw() -> None:
        received = torch.empty_like(plain)
        if comm.rank == 0:
            raw_message(plain, comm.rank, sender=0)
            raw_message(received, comm.rank, sender=1)
        else:
            raw_message(received, comm.rank, sender=0)
            raw_message(gradient, comm.rank, sender=1)

    def gloo() -> None:
        received = torch.empty_like(plain)
        if comm.rank == 0:
            dist.send(plain, 1)
            dist.recv(received, 1)
        else:
            dist.recv(received, 0)
            dist.send(gradient, 0)

    def hand_written() -> None:
        if comm.rank == 0:
            x.grad = None
            Send.apply(x, 1).backward()  # type: ignore[attr-defined]
        else:
            Receive.apply(anchor, 0).backward(gradient)  # type: ignore[attr-defined]

    def autograd_only() -> None:
        Nothing.apply(anchor, nbytes).backward(gradient)  # type: ignore[attr-defined]

    return {
        "TorchMN": ours,
        "raw mpi4py": raw,
        "gloo": gloo,
        "hand-written": hand_written,
        "autograd only": autograd_only,
        "copies only": copies(comm.rank, plain, gradient),
    }


def used_tensor(comm: torchmn.Communicator, nbytes: int) -> Contenders:
    """The same for values that are written before they are sent and read after they are received."""
    x = torch.zeros(nbytes // 4, requires_grad=True)
    plain, gradient = torch.zeros(nbytes // 4), torch.ones(nbytes // 4)

    def ours() -> None:
        if comm.rank == 0:
            x.detach().add_(1)
            x.grad = None
            F.send(x, comm, 1).backward()
            assert x.grad is not None
            x.grad.sum()
        else:
            received = F.recv(comm, 0)
            received.detach().sum()
            gradient.add_(1)
            received.backward(gradient)

    def raw() -> None:
        received = torch.empty_like(plain)
        if comm.rank == 0:
            raw_message(plain.add_(1), comm.rank, sender=0)
            raw_message(received, comm.rank, sender=1)
            received.sum()
        else:
            raw_message(received, comm.rank, sender=0)
            received.sum()
            raw_message(gradient.add_(1), comm.rank, sender=1)

    return {"TorchMN": ours, "raw mpi4py": raw}


def many_tensors(comm: torchmn.Communicator, nbytes: int) -> Contenders:
    """Several tensors to rank 1, then all gradients back: one backward on each rank."""
    leaves = [torch.zeros(nbytes // 4, requires_grad=True) for _ in range(EDGES)]
    gradients = [torch.ones(nbytes // 4) for _ in range(EDGES)]
    plain = [leaf.detach() for leaf in leaves]

    def ours() -> None:
        if comm.rank == 0:
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward([F.send(leaf, comm, 1) for leaf in leaves])
        else:
            torch.autograd.backward([F.recv(comm, 0) for _ in gradients], gradients)

    def raw() -> None:
        received = [torch.empty_like(each) for each in plain]
        forward, backward = (plain, received) if comm.rank == 0 else (received, gradients)
        for each in forward:
            raw_message(each, comm.rank, sender=0)
        for each in backward:
            raw_message(each, comm.rank, sender=1)

    return {"TorchMN": ours, "raw mpi4py": raw}


def raw_message(x: torch.Tensor, rank: int, sender: int) -> None:
    """One message from `sender` to the other rank, from or into `x`."""
    if rank == sender:
        RAW.Send([memory(x), MPI.BYTE], 1 - sender)
    else:
        RAW.Recv([memory(x), MPI.BYTE], sender)


def copies(rank: int, value: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    """`value` to rank 1 and `gradient` back, by copies through shared memory alone."""
    nbytes = value.nbytes
    window = MPI.Win.Allocate_shared(PAGE + nbytes, comm=RAW)
    starts = [window.Shared_query(peer)[0].address for peer in range(2)]
    full = [ctypes.c_uint64.from_address(start) for start in starts]
    for flag in full:
        flag.value = 0
    RAW.Barrier()

    def put(x: torch.Tensor) -> None:
        ctypes.memmove(starts[rank] + PAGE, x.data_ptr(), nbytes)
        full[rank].value = 1

    def get() -> None:
        received = torch.empty_like(value)
        while not full[1 - rank].value:
            pass
        ctypes.memmove(received.data_ptr(), starts[1 - rank] + PAGE, nbytes)
        full[1 - rank].value = 0

    def both_ways() -> None:
        if rank == 0:
            put(value)
            get()
        else:
            get()
            put(gradient)

    return both_ways


DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
HEADER = bytearray(80)  # the code of the dtype, the number of dims, and up to 8 dims


def send_with_header(x: torch.Tensor, dest: int) -> None:
    header = struct.pack(f"{2 + x.dim()}q", CODES[x.dtype], x.dim(), *x.shape)
    RAW.Send([header, MPI.BYTE], dest)
    RAW.Send([memory(x), MPI.BYTE], dest)


def receive_with_header(source: int) -> torch.Tensor:
    RAW.Recv([HEADER, MPI.BYTE], source)
    code, dims = struct.unpack_from("2q", HEADER)
    x = torch.empty(struct.unpack_from(f"{dims}q", HEADER, 16), dtype=DTYPES[code])
    RAW.Recv([memory(x), MPI.BYTE], source)
    return x


class Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dest: int) -> torch.Tensor:
        send_with_header(x.contiguous(), dest)
        ctx.dest = dest
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return receive_with_header(ctx.dest), None


class Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, source: int) -> torch.Tensor:
        ctx.source = source
        return receive_with_header(source)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        send_with_header(gradients[0].contiguous(), ctx.source)
        return None, None


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes // 4)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[None, None]:
        return None, None


def main() -> None:
    options = arguments(__doc__, rounds=12).parse_args()
    comm = two_ranks()
    start_gloo()
    results = Results("tensor and gradient")

    def measure(case: str, contenders: Contenders, nbytes: int, tensors: int = 1) -> None:
        iterations = max(5, min(50, 20 * MB // nbytes) // tensors)
        times = take_turns(contenders, options, iterations, factor=TURNS_PER_ROUND)
        results.add(case, {name: [seconds / tensors for seconds in turns] for name, turns in times.items()})

    for nbytes in (KB, 64 * KB, MB, 4 * MB):
        measure(size_text(nbytes), one_tensor(comm, nbytes), nbytes)
    measure("1 MB, used", used_tensor(comm, MB), MB)
    measure(f"{EDGES} x 1 KB", many_tensors(comm, KB), EDGES * KB, EDGES)
    if comm.rank == 0:
        results.finish(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
