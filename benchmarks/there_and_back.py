"""Part (a) of model_parallel.py: a tensor goes to the other rank and its gradient comes back.

The first table is microseconds for there and back: by our `send` and `recv`; by `raw` messages of mpi4py without
autograd, and by `gloo`'s; and by what one would write oneself (by_hand.py says what those columns are). `limit` is what
the copies alone take: into memory that both ranks map and out of it, both ways, without messages, checks and autograd.

The second table is what that means. How much over raw we are, the `prototype` of two messages each way, and what users
write `by hand`; and our share of what the prototype takes over raw, `ours/prototype`, in which the speed of the machine
cancels out: the median over turns, in each of which both ran, one right after the other. `raw/ours` is our bandwidth as
a share of raw mpi4py's; `gloo/ours` how many times faster than gloo's plain messages, without autograd, we are.

Two rows more, which no issue asks for. `1 MB, used`: what is sent is written before, and what is received is read
after, as it would be in a model. `16 x 1 KB`: so many tensors are sent one after the other, and each rank calls
backward once for all of them, as a model does; microseconds per tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from statistics import median

import by_hand
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
_PAGE = 4096


def there_and_back(comm: torchmn.Communicator, nbytes: int) -> side_by_side.Contenders:
    """A tensor of `nbytes` from rank 0 to rank 1, and a gradient of its size back."""
    x = torch.zeros(nbytes // 4, requires_grad=True)
    gradient = torch.ones(nbytes // 4)
    plain = x.detach()

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

    def gloo() -> None:
        fresh = torch.empty_like(plain)
        if comm.rank == 0:
            dist.send(plain, 1)
            dist.recv(fresh, 1)
        else:
            dist.recv(fresh, 0)
            dist.send(gradient, 0)

    limit = _copies(comm.rank, plain, gradient)
    return {"ours": ours, "raw": raw, "limit": limit, "gloo": gloo, **by_hand.contenders(comm.rank, nbytes)}


def _copies(rank: int, value: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
    """`value` to rank 1 and `gradient` back, by copies through shared memory and nothing else."""
    nbytes = value.nbytes
    window = MPI.Win.Allocate_shared(_PAGE + nbytes, comm=RAW)
    starts = [window.Shared_query(peer)[0].address for peer in range(2)]
    full = [ctypes.c_uint64.from_address(start) for start in starts]
    for each in full:
        each.value = 0
    RAW.Barrier()

    def put(x: torch.Tensor) -> None:
        ctypes.memmove(starts[rank] + _PAGE, x.data_ptr(), nbytes)
        full[rank].value = 1

    def get() -> None:
        fresh = torch.empty_like(value)
        while not full[1 - rank].value:
            pass
        ctypes.memmove(fresh.data_ptr(), starts[1 - rank] + _PAGE, nbytes)
        full[1 - rank].value = 0

    def both_ways() -> None:
        if rank == 0:
            put(value)
            get()
        else:
            get()
            put(gradient)

    return both_ways


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
            torch.autograd.backward([by_hand.BareSend.apply(leaf) for leaf in leaves])
        else:
            torch.autograd.backward([by_hand.BareReceive.apply(anchor, nbytes) for _ in gradients], gradients)

    return {"ours": ours, "raw": raw, "bare": bare}


def _pass_on(x: torch.Tensor, rank: int, sender: int) -> None:
    """One raw message from `sender` to the other rank."""
    if rank == sender:
        RAW.Send([memory(x), MPI.BYTE], 1 - sender)
    else:
        RAW.Recv([memory(x), MPI.BYTE], sender)


_COLUMNS = ("ours", "limit", "raw", "bare", "torch", "prototype", "by hand", "gloo")
_TOGETHER = ("ours", "limit", "bare", "prototype", "by hand")  # compared within the same tenths of a second
_TURNS = 10  # in a round: the machine changes its speed several times a second, so turns are short, and many

Times = dict[str, list[float]]
"""Microseconds per tensor of each contender in each turn."""


def table(comm: torchmn.Communicator, rounds: int) -> str:
    """The two tables, each with a row for each size, and the two rows that are beside the issue."""
    rows = {
        side_by_side.size_text(size): _times(there_and_back(comm, size), size, rounds)
        for size in (KB, 64 * KB, MB, 4 * MB)
    }
    rows["1 MB, used"] = _times(used(comm, MB), MB, rounds)
    rows[f"{EDGES} x 1 KB"] = _times(many_edges(comm, KB), EDGES * KB, rounds, EDGES)
    for title, times in rows.items():
        side_by_side.keep(f"there and back, {title}", 1e-6 * median(times["ours"]))
    header = ["size", "ours over raw us", "prototype's", "by hand's", "ours/prototype", "raw/ours", "gloo/ours"]
    medians = [
        [title, *[f"{median(times[name]):.1f}" if name in times else "" for name in _COLUMNS]]
        for title, times in rows.items()
    ]
    comparisons = [[title, *_comparison(times)] for title, times in rows.items()]
    return "\n\n".join(
        [
            side_by_side.table(["size", *[f"{name} us" for name in _COLUMNS]], medians),
            side_by_side.table(header, comparisons),
        ]
    )


def _times(contenders: side_by_side.Contenders, nbytes: int, rounds: int, tensors: int = 1) -> Times:
    iterations = max(5, min(50, 20 * MB // nbytes) // tensors)
    together = [name for name in contenders if name in _TOGETHER]
    groups = [together, *[[name] for name in contenders if name not in together]]
    seconds = side_by_side.times_in_turns(contenders, iterations, _TURNS * rounds, RAW.Barrier, groups)
    return {name: [1e6 * value / tensors for value in values] for name, values in seconds.items()}


def _comparison(times: Times) -> list[str]:
    """A row of the second table, but for its title; empty where there is no such contender."""
    micro = {name: median(values) for name, values in times.items()}
    raw = micro["raw"]
    cells = [f"{micro[name] - raw:+.1f}" if name in micro else "" for name in ("ours", "prototype", "by hand")]
    shares = [
        (mine - raw) / (theirs - raw) for mine, theirs in zip(times["ours"], times.get("prototype", ()), strict=False)
    ]
    # Where our one copy is faster than raw messages, a share of what others take over them says nothing.
    cells.append(f"{median(shares):.2f}" if shares and micro["ours"] > raw else "")
    cells.append(f"{raw / micro['ours']:.2f}")
    cells.append(f"{micro['gloo'] / micro['ours']:.1f}" if "gloo" in micro else "")
    return cells
