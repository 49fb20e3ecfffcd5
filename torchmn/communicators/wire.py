"""A message between two ranks: a header of integers, then the bytes of its tensors.

The header says everything a receiver needs, so that nothing is pickled and nothing has to be announced:
what the message is, which edge of a graph it belongs to, and each tensor's dtype, shape, home and whether its
sender waits for a gradient.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

DEFAULT_MAX_MESSAGE_BYTES = 1 << 30
"""Larger buffers travel in pieces of this size: MPI counts in a C int, and so do some of its transports."""

# The position in this tuple is the number on the wire: only ever append.
_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _DTYPE_NAMES)
DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}


class Kind(IntEnum):
    """What a message is, which decides the method that may receive it."""

    TENSOR = 0
    TUPLE = 1
    OBJECT = 2
    ERROR = 3  # the sender could not send; the payload is the text of its error
    LONG = 4  # the real header was too long for one message and follows as a payload


_KINDS = tuple(Kind)


class TensorSpec(NamedTuple):
    """Dtype and shape of one tensor on its way, and whether it left a GPU and wants its gradient back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_gpu: bool = False
    wants_gradient: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Room for this tensor, in host memory."""
        return torch.empty(self.shape, dtype=self.dtype)


@dataclass(slots=True)
class Message:
    """What one `send` carries: its tensors in order, and the number of the graph edge they travel on."""

    kind: Kind
    tensors: tuple[Tensor, ...]
    edge: int = 0
    wants_gradient: tuple[bool, ...] = ()
    on_gpu: tuple[bool, ...] = ()
    private: bool = True  # nobody else can change the tensors while they are on their way

    def specs(self) -> list[TensorSpec]:
        """One `TensorSpec` per tensor, in order."""
        none = (False,) * len(self.tensors)
        every = zip(self.tensors, self.on_gpu or none, self.wants_gradient or none, strict=True)
        return [TensorSpec(x.dtype, x.shape, on_gpu, gradient) for x, on_gpu, gradient in every]


class Header(NamedTuple):
    """A message without its payload. What `number` means is the transport's business."""

    kind: Kind
    edge: int
    number: int
    specs: list[TensorSpec]

    @property
    def nbytes(self) -> int:
        """Size of the payload."""
        return sum(spec.nbytes for spec in self.specs)

    def encode(self) -> bytes:
        """This header as little-endian 64-bit integers, its own length first."""
        words = [0, self.kind, self.edge, self.number, len(self.specs)]
        for dtype, shape, on_gpu, wants_gradient in self.specs:
            words += (DTYPE_CODES[dtype] | on_gpu << 8 | wants_gradient << 9, len(shape), *shape)
        words[0] = len(words)
        return struct.pack(f"<{len(words)}q", *words)

    @staticmethod
    def decode(buffer: bytes | bytearray | memoryview) -> tuple[Header, int]:
        """The header at the start of `buffer`, and how many bytes it takes there."""
        (length,) = struct.unpack_from("<q", buffer)
        words = struct.unpack_from(f"<{length}q", buffer)
        specs, at = [], 5
        for _ in range(words[4]):
            flags, end = words[at], at + 2 + words[at + 1]
            dtype = DTYPES[flags & 0xFF]
            assert dtype is not None, "a dtype that this torch does not have"
            specs.append(TensorSpec(dtype, words[at + 2 : end], bool(flags & 1 << 8), bool(flags & 1 << 9)))
            at = end
        return Header(_KINDS[words[1]], words[2], words[3], specs), 8 * length

    def message(self, tensors: Sequence[Tensor]) -> Message:
        """The message that this header announced, with its payload."""
        gradients = tuple(spec.wants_gradient for spec in self.specs)
        return Message(self.kind, tuple(tensors), self.edge, gradients, tuple(spec.on_gpu for spec in self.specs))


def read_memory(x: Tensor) -> bytes:
    """A copy of the memory of a contiguous tensor on the host."""
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def write_memory(x: Tensor, data: bytes | memoryview, start: int = 0) -> None:
    """Fill a contiguous tensor on the host from `data`, beginning at byte `start` there."""
    if x.nbytes:
        memoryview((ctypes.c_char * x.nbytes).from_address(x.data_ptr())).cast("B")[:] = data[start : start + x.nbytes]


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as a flat uint8 tensor, without a copy."""
    if x.numel() == 0:  # its strides may be anything, and then it can not be viewed
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return x.reshape(-1).view(torch.uint8)


def from_bytes(data: bytes | bytearray) -> Tensor:
    """A uint8 tensor that holds `data`."""
    # bytearray: torch warns about buffers that it must not write.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def from_buffer(data: bytes | bytearray | Tensor) -> Tensor:
    """`data` itself if it is a tensor already, else a uint8 tensor of it."""
    return data if isinstance(data, Tensor) else from_bytes(data)


def to_bytes(x: Tensor) -> bytes:
    """The bytes that a flat uint8 tensor holds."""
    return x.numpy().tobytes()


def pieces(flat: Tensor, limit: int) -> Iterator[Tensor]:
    """`flat` cut into views of at most `limit` bytes (at least one element); none for an empty tensor."""
    step = max(1, limit // flat.element_size())
    if 0 < flat.numel() <= step:
        yield flat
        return
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]
