"""Part (a) of model_parallel.py: a tensor goes to the other rank and its gradient comes back.

Times are microseconds for there and back. `raw/ours` is our bandwidth as a share of raw mpi4py's; `gloo/ours` how many
times faster than gloo's plain messages, without autograd, we are. `bare` is what torch itself asks for: the two raw
messages inside of the smallest autograd functions that can be written. And `torch` is the receiver's part of that
without any message: such a function and its `backward(gradient)`, each rank for itself. The gradient can not leave
before that is done, so nobody is less than this over raw.

Two rows more, which no issue asks for. `1 MB, used`: what is sent is written before, and what is received is read
after, as it would be in a model. `16 x 1 KB`: so many tensors are sent one after the other, and each rank calls
backward once for all of them, as a model does; microseconds per tensor.
"""

from __future__ import annotations

from typing import Any

import side_by_side
import torch
import torch.distributed as dist
from communicators import memory
from mpi4py import MPI

import torchmn
from torchmn import functions as F

KB, MB = 1 << 10, 1 << 20
RAW = MPI.COMM_WORLD
EDGES = 16


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


def used(comm: torchmn.Communicator, nbytes: int) -> side_by_side.Contenders:
    """`there_and_back` of values that are written before they are sent, and read after they are received."""
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
        fresh = torch.empty_like(plain)
        if comm.rank == 0:
            plain.add_(1)
            RAW.Send([memory(plain), MPI.BYTE], 1)
            RAW.Recv([memory(fresh), MPI.BYTE], 1)
            fresh.sum()
        else:
            RAW.Recv([memory(fresh), MPI.BYTE], 0)
            fresh.sum()
            gradient.add_(1)
            RAW.Send([memory(gradient), MPI.BYTE], 0)

    return {"ours": ours, "raw": raw}


def many_edges(comm: torchmn.Communicator, nbytes: int) -> side_by_side.Contenders:
    """Several tensors there, then all their gradients back: one backward on each rank."""
    leaves = [torch.zeros(nbytes // 4, requires_grad=True) for _ in range(EDGES)]
    gradients = [torch.ones(nbytes // 4) for _ in range(EDGES)]
    plain = [leaf.detach() for leaf in leaves]
    anchor = torch.zeros((), requires_grad=True)

    def ours() -> None:
        if comm.rank == 0:
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward([F.send(leaf, comm, 1) for leaf in leaves])
        else:
            torch.autograd.backward([F.recv(comm, 0) for _ in gradients], gradients)

    def raw() -> None:
        fresh = [torch.empty_like(each) for each in plain]
        here, there = (plain, fresh) if comm.rank == 0 else (fresh, gradients)
        for each in here:
            _pass_on(each, comm.rank, 0)
        for each in there:
            _pass_on(each, comm.rank, 1)

    def bare() -> None:
        if comm.rank == 0:
            for leaf in leaves:
                leaf.grad = None
            torch.autograd.backward([_BareSend.apply(leaf) for leaf in leaves])
        else:
            torch.autograd.backward([_BareReceive.apply(anchor, nbytes) for _ in gradients], gradients)

    return {"ours": ours, "raw": raw, "bare": bare}


def _pass_on(x: torch.Tensor, rank: int, sender: int) -> None:
    """One raw message from `sender` to the other rank."""
    if rank == sender:
        RAW.Send([memory(x), MPI.BYTE], 1 - sender)
    else:
        RAW.Recv([memory(x), MPI.BYTE], sender)


def table(comm: torchmn.Communicator, rounds: int) -> str:
    """A row for each size, and the two that are beside the issue."""
    sizes = (KB, 64 * KB, MB, 4 * MB)
    rows = [_row(side_by_side.size_text(size), there_and_back(comm, size), _iterations(size), rounds) for size in sizes]
    rows.append(_row("1 MB, used", used(comm, MB), _iterations(MB), rounds))
    rows.append(_row(f"{EDGES} x 1 KB", many_edges(comm, KB), _iterations(KB) // 4, rounds, EDGES))
    header = ["size", "ours us", "raw us", "bare us", "torch us", "gloo us", "over raw us", "raw/ours", "gloo/ours"]
    return side_by_side.table(header, rows)


def _iterations(nbytes: int) -> int:
    return max(5, min(300, 32 * MB // nbytes))


def _row(title: str, contenders: side_by_side.Contenders, iterations: int, rounds: int, tensors: int = 1) -> list[str]:
    """The times per tensor of one size."""
    seconds = side_by_side.take_turns(contenders, iterations, rounds, RAW.Barrier)
    micro = {name: 1e6 * value / tensors for name, value in seconds.items()}
    times = [f"{micro[name]:.1f}" if name in micro else "" for name in ("ours", "raw", "bare", "torch", "gloo")]
    ratios = [
        f"{micro[name] / micro['ours']:.{digits}f}" if name in micro else ""
        for name, digits in (("raw", 2), ("gloo", 1))
    ]
    return [title, *times, f"{micro['ours'] - micro['raw']:+.1f}", *ratios]
