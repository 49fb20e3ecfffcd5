"""What one writes around raw mpi4py to train through a message: contenders of there_and_back.py, rank 0 to rank 1.

`prototype`: two autograd functions, in which each way is two messages, a header with dtype and shape and then the
payload. It is what issue 4 speaks of, measured on another machine: beside ours, it tells what the issue's microseconds
are here. It knows nothing of edges, of checks or of a rank that does not answer.

`by hand`: no function at all. Both ranks know the shape; what came is a leaf, and its gradient is sent back after
`backward(gradient)`. This works for one value at the end of a model, and that is what users wrote before.

`bare`: the two raw messages inside of the smallest autograd functions that can be written; sizes are known.

`torch`: the receiver's part of `bare` without any message, each rank for itself. The gradient can not leave before that
is done, so nobody who returns a node of autograd's graph is less than this over raw.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from communicators import memory
from mpi4py import MPI

RAW = MPI.COMM_WORLD


def contenders(rank: int, nbytes: int) -> dict[str, Callable[[], None]]:
    """Each of them, for a float32 tensor of `nbytes` that goes to rank 1 and its gradient, which comes back."""
    x = torch.zeros(nbytes // 4, requires_grad=True)
    gradient = torch.ones(nbytes // 4)
    anchor = torch.zeros((), requires_grad=True)

    def prototype() -> None:
        if rank == 0:
            x.grad = None
            _PrototypeSend.apply(x, 1).backward()  # type: ignore[attr-defined]
        else:
            _PrototypeReceive.apply(anchor, 0).backward(gradient)  # type: ignore[attr-defined]

    def by_hand() -> None:
        fresh = torch.empty(nbytes // 4)
        if rank == 0:
            x.grad = None
            RAW.Send([memory(x), MPI.BYTE], 1)
            RAW.Recv([memory(fresh), MPI.BYTE], 1)
            x.backward(fresh)
        else:
            RAW.Recv([memory(fresh), MPI.BYTE], 0)
            fresh.requires_grad_().backward(gradient)
            assert fresh.grad is not None
            RAW.Send([memory(fresh.grad), MPI.BYTE], 0)

    def bare() -> None:
        if rank == 0:
            x.grad = None
            BareSend.apply(x).backward()  # type: ignore[attr-defined]
        else:
            BareReceive.apply(anchor, nbytes).backward(gradient)  # type: ignore[attr-defined]

    def only_torch() -> None:
        _Nothing.apply(anchor, nbytes).backward(gradient)  # type: ignore[attr-defined]

    return {"prototype": prototype, "by hand": by_hand, "bare": bare, "torch": only_torch}


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_MOST_DIMS = 8
_header = bytearray(8 * (2 + _MOST_DIMS))
_header_buffer = [_header, MPI.BYTE]


def _send_with_header(x: torch.Tensor, dest: int) -> None:
    header = struct.pack(f"{2 + x.dim()}q", _CODES[x.dtype], x.dim(), *x.shape)
    RAW.Send([header, MPI.BYTE], dest)
    RAW.Send([memory(x), MPI.BYTE], dest)


def _receive_with_header(source: int) -> torch.Tensor:
    RAW.Recv(_header_buffer, source)
    code, dims = struct.unpack_from("2q", _header)
    x = torch.empty(struct.unpack_from(f"{dims}q", _header, 16), dtype=_DTYPES[code])
    RAW.Recv([memory(x), MPI.BYTE], source)
    return x


class _PrototypeSend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dest: int) -> torch.Tensor:
        _send_with_header(x.contiguous(), dest)
        ctx.dest = dest
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _receive_with_header(ctx.dest), None


class _PrototypeReceive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, source: int) -> torch.Tensor:
        ctx.source = source
        return _receive_with_header(source)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        _send_with_header(gradients[0].contiguous(), ctx.source)
        return None, None


class BareSend(torch.autograd.Function):
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


class BareReceive(torch.autograd.Function):
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
