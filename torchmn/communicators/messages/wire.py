"""The format of a message between two ranks: a header of integers, then the bytes of its tensors.

The header contains the kind of message, the number of the request or reply, and of each tensor dtype, shape, whether it
was on a GPU, and whether its sender expects a reply for it. Nothing is pickled, and no other message has to precede it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchmn._torch_compat import plain_torch_function

DEFAULT_MAX_MESSAGE_BYTES = 1 << 30
"""Larger buffers are sent in pieces of this size: MPI and some of its transports count bytes in a C int."""

# The index in this tuple is the code on the wire: only append.
_DTYPE_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128", "complex32", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
DTYPES: tuple[torch.dtype | None, ...] = tuple(getattr(torch, name, None) for name in _DTYPE_NAMES)
DTYPE_CODES: dict[torch.dtype, int] = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}


class Kind(IntEnum):
    """The kind of a message, which determines the method that may receive it."""

    TENSOR = 0
    TUPLE = 1
    OBJECT = 2
    ERROR = 3  # the sender failed; the payload is the text of its error
    LONG = 4  # the header is too long for one message and follows as a payload
    ARRAY = 5  # as TENSOR and TUPLE, but NumPy arrays were sent, and the receiver gets arrays
    ARRAYS = 6


KINDS = tuple(Kind)


class ArrayTensor(Tensor):
    """A tensor with the memory of a NumPy array. Who receives it gets an array."""

    __torch_function__ = plain_torch_function


_NO = (False,)
_FLAGS = ((False, False), (True, False), (False, True), (True, True))  # (on_gpu, wants_reply), indexed by the two bits
_PREFIX = struct.Struct("<4q")


@lru_cache(maxsize=4096)
def _template(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns an expanded tensor of one element, for `empty_like`, which is twice as fast as `empty`."""
    return torch.empty((), dtype=dtype, device="cpu").expand(shape)


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor in a message, whether it was on a GPU, and whether a reply is expected for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    on_gpu: bool = False
    wants_reply: bool = False

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, gpu: torch.device | None = None) -> Tensor:
        """Returns an empty tensor: on the host, or on `gpu`, if given and if the tensor was on a GPU."""
        if gpu is not None and self.on_gpu:
            return torch.empty(self.shape, dtype=self.dtype, device=gpu)
        return torch.empty_like(_template(self.dtype, self.shape), memory_format=torch.contiguous_format)


@dataclass(slots=True)
class Message:
    """The content of one `send`.

    Attributes:
        kind: which method may receive it.
        tensors: in order.
        request: number of the request that this message is, or replies to; 0 for none.
        wants_reply: of each tensor, whether a reply is expected; () for none.
        on_gpu: of each tensor, whether it was on a GPU; () for none.
        private: whether no other code can change the tensors while they are sent.
    """

    kind: Kind
    tensors: tuple[Tensor, ...]
    request: int = 0
    wants_reply: tuple[bool, ...] = ()
    on_gpu: tuple[bool, ...] = ()
    private: bool = True

    def payload(self) -> Tensor | tuple[Tensor, ...]:
        """Returns the tensor that was sent, or a tuple if a tuple or list was sent."""
        kind = self.kind
        return self.tensors[0] if kind == Kind.TENSOR or kind == Kind.ARRAY else self.tensors

    def arrays(self) -> np.ndarray | tuple[np.ndarray, ...]:
        """Returns the array that was sent, or a tuple if a tuple or list was sent."""
        arrays = tuple([x.numpy() for x in self.tensors])
        return arrays[0] if self.kind == Kind.ARRAY else arrays

    def layout(self) -> Layout:
        """Returns the description of its tensors for the header."""
        if len(self.tensors) == 1:  # the common case, in one step
            x = self.tensors[0]
            return _layout_of_one(x.dtype, x.shape, *(self.on_gpu or _NO), *(self.wants_reply or _NO))
        none = (False,) * len(self.tensors)
        triples = zip(self.tensors, self.on_gpu or none, self.wants_reply or none, strict=True)
        return Layout.of(tuple([TensorSpec(x.dtype, x.shape, on_gpu, reply) for x, on_gpu, reply in triples]))


class Layout(NamedTuple):
    """Description of the tensors of a message. Cached, because programs send the same few layouts again and again."""

    specs: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]  # bytes of each tensor
    nbytes: int
    wants_reply: tuple[bool, ...]
    on_gpu: tuple[bool, ...]  # () if none is
    encoded: bytes

    @staticmethod
    def of(specs: tuple[TensorSpec, ...]) -> Layout:
        return _layout_of_few(specs) if len(specs) <= _FEW else _layout_of(specs)

    @staticmethod
    def read(encoded: bytes) -> Layout:
        return _read_few(encoded) if len(encoded) <= _FEW * 32 else _read(encoded)


def _layout_of(specs: tuple[TensorSpec, ...]) -> Layout:
    sizes = tuple(spec.nbytes for spec in specs)
    on_gpu = tuple(spec.on_gpu for spec in specs)
    words = []
    for dtype, shape, gpu, reply in specs:
        words += (DTYPE_CODES[dtype] | gpu << 8 | reply << 9, len(shape), *shape)
    encoded = struct.pack(f"<{len(words)}q", *words)
    wants_reply = tuple(spec.wants_reply for spec in specs)
    return Layout(specs, sizes, sum(sizes), wants_reply, on_gpu if any(on_gpu) else (), encoded)


def _read(encoded: bytes) -> Layout:
    words = struct.unpack(f"<{len(encoded) // 8}q", encoded)
    specs, at = [], 0
    while at < len(words):
        flags, end = words[at], at + 2 + words[at + 1]
        dtype = DTYPES[flags & 0xFF]
        assert dtype is not None, "a dtype that this torch does not have"
        specs.append(TensorSpec(dtype, words[at + 2 : end], *_FLAGS[flags >> 8]))
        at = end
    return Layout.of(tuple(specs))


@lru_cache(maxsize=4096)
def _layout_of_one(dtype: torch.dtype, shape: torch.Size, on_gpu: bool, wants_reply: bool) -> Layout:
    return _layout_of((TensorSpec(dtype, shape, on_gpu, wants_reply),))


# Layouts of many tensors, whose shapes may never repeat, are not cached: the number of entries would not bound the
# memory.
_layout_of_few, _read_few = lru_cache(maxsize=4096)(_layout_of), lru_cache(maxsize=4096)(_read)
_FEW = 16  # tensors (of a few dims) of a layout that is cached


class Header(NamedTuple):
    """A message without its payload. The transport defines the meaning of `number`."""

    kind: Kind
    request: int
    number: int
    layout: Layout

    def encode(self) -> bytes:
        """Returns this header as little-endian 64-bit integers: request, length of the header, kind, number, layout."""
        tail = self.layout.encoded
        return _PREFIX.pack(self.request, 4 + len(tail) // 8, self.kind, self.number) + tail

    @staticmethod
    def decode(buffer: bytes | bytearray | memoryview) -> tuple[Header, int]:
        """Returns the header at the start of `buffer`, and its number of bytes."""
        request, length, kind, number = _PREFIX.unpack_from(buffer)
        return Header(KINDS[kind], request, number, Layout.read(bytes(buffer[32 : 8 * length]))), 8 * length

    def message(self, tensors: Sequence[Tensor]) -> Message:
        """Returns the message of this header, with its payload."""
        layout = self.layout
        return Message(self.kind, tuple(tensors), self.request, layout.wants_reply, layout.on_gpu)

    def message_in(self, buffer: bytes | bytearray, start: int) -> Message:
        """Returns the message whose payload begins at byte `start` of `buffer`, which is copied."""
        tensors = []
        for spec, nbytes in zip(self.layout.specs, self.layout.sizes, strict=True):
            tensors.append(tensor_in(buffer, start, nbytes, spec))
            start += nbytes
        return self.message(tensors)


def read_memory(x: Tensor) -> bytes:
    """Returns a copy of the memory of a contiguous tensor on the host."""
    return ctypes.string_at(x.data_ptr(), x.nbytes)


def tensor_in(buffer: bytes | bytearray, start: int, nbytes: int, spec: TensorSpec) -> Tensor:
    """Returns a tensor with a copy of `nbytes` bytes of `buffer` from `start` on."""
    if nbytes == 0:
        return spec.empty()
    copy = buffer[start : start + nbytes]
    flat = torch.frombuffer(copy if isinstance(copy, bytearray) else bytearray(copy), dtype=spec.dtype)
    # Resized instead of viewed: autograd forbids in-place changes of a view that a custom function returns.
    return flat if len(spec.shape) == 1 else flat.resize_(spec.shape)


def as_bytes(x: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as a flat uint8 tensor, without a copy."""
    if x.numel() == 0:  # it may have strides that cannot be viewed
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return x.reshape(-1).view(torch.uint8)


def from_bytes(data: bytes | bytearray) -> Tensor:
    """Returns a uint8 tensor with a copy of `data`."""
    # bytearray: torch warns about buffers that it must not write.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty_bytes(0)


def empty_bytes(nbytes: int) -> Tensor:
    """Returns an empty uint8 tensor on the host, whatever the user's default device is."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def from_buffer(data: bytes | bytearray | Tensor) -> Tensor:
    """Returns `data` itself if it is a tensor, otherwise a uint8 tensor with a copy of it."""
    return data if isinstance(data, Tensor) else from_bytes(data)


def to_bytes(x: Tensor) -> bytes:
    """Returns the bytes of a flat uint8 tensor on the host."""
    return x.numpy().tobytes()


def pieces(flat: Tensor, limit: int) -> Iterator[Tensor]:
    """Yields views of `flat` of at most `limit` bytes (at least one element); none for an empty tensor."""
    step = max(1, limit // flat.element_size())
    if 0 < flat.numel() <= step:
        yield flat
        return
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]
