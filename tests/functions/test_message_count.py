"""What `send` and `recv` cost: one message each way, header and payload together, and no pickle."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests._worlds import ranks
from torchmn import functions as F

# mpi4py's upper-case methods move memory, its lower-case ones pickle.
STARTS_A_MESSAGE = ("Isend", "Send", "Ssend", "Issend", "Rsend", "Sendrecv")
SILENT = ("Recv", "Irecv", "Iprobe", "rank", "size")


class CountedMPI:
    """An MPI communicator that counts its messages, and raises for operations that pickle."""

    def __init__(self, comm: Any):
        self.comm = comm
        self.sent: list[int] = []  # the tag of each

    def __getattr__(self, name: str) -> Any:
        if name in SILENT:
            return getattr(self.comm, name)
        assert name in STARTS_A_MESSAGE, f"a message by {name}"

        def send(buffer: Any, dest: int, tag: int = 0, *rest: Any) -> Any:
            self.sent.append(tag)
            return getattr(self.comm, name)(buffer, dest, tag, *rest)

        return send


@contextmanager
def counted(comm: Any):
    """The messages that this rank starts meanwhile."""
    comm.barrier()
    mpi = comm.transport.p2p
    comm.transport.p2p = CountedMPI(mpi)
    try:
        yield comm.transport.p2p.sent
    finally:
        comm.transport.p2p = mpi


PAYLOADS = {
    "a scalar": lambda: torch.tensor(3.0),
    "1 KB": lambda: torch.ones(256),
    "a matrix that is not contiguous": lambda: torch.ones(8, 16).t(),
    "64 KB": lambda: torch.ones(1 << 14),
    "a tuple": lambda: (torch.ones(3), torch.ones(2, 2), torch.ones(1)),
}


@ranks(2, on="mpi")
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_send_and_its_gradient_are_one_message_each(comm, payload) -> None:
    x = PAYLOADS[payload]()
    for first_time in (True, False):  # the first gradient from a line carries the text of that line along
        leaves = [each.clone().requires_grad_() for each in (x if isinstance(x, tuple) else (x,))]
        with counted(comm) as sent:
            if comm.rank == 0:
                phi = F.send(tuple(leaves) if isinstance(x, tuple) else leaves[0], comm, 1, tag=7)
                assert sent == [7], "forward"
                phi.backward()
                assert sent == [7], "backward only receives"
                assert all(torch.equal(leaf.grad, 2 * leaf.detach()) for leaf in leaves), first_time
            else:
                received = F.recv(comm, 0, tag=7, force_tuple=True)
                assert sent == [], "forward only receives"
                sum((each**2).sum() for each in received).backward()
                assert sent == [comm.traits.tag_limit], "one answer, on backward's tag"


@ranks(2, on="mpi")
def test_values_without_a_gradient_are_one_message_and_get_no_answer(comm) -> None:
    with counted(comm) as sent:
        if comm.rank == 0:
            F.send(torch.arange(5), comm, 1)
        else:
            assert F.recv(comm, 0).tolist() == [0, 1, 2, 3, 4]
        assert sent == ([0] if comm.rank == 0 else [])
