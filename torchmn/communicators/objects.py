"""Converts Python objects that pickle to flat tensors of bytes, and back: `pack` and `unpack`.

Tensors inside an object are not pickled: pickling copies a tensor more than once, and copies the whole storage of a
    slice.
The pickle contains their indices, and their bytes follow it.

Layout: two integers (offsets of the list of `TensorSpec` and of the tensors), the pickled object, the pickled list, the
tensors.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.arguments import describe
from torchmn.communicators.messages import wire
from torchmn.communicators.messages.wire import TensorSpec

_PREFIX = struct.Struct("<2q")


def pack(obj: Any, largest: int | None = None) -> tuple[Tensor, list[Tensor]]:
    """Returns `obj` as a flat uint8 tensor, and the tensors larger than `largest` bytes, which it leaves out, in order.

    Raises:
        Exception: of any type, if the object cannot be pickled.
    """
    stream = io.BytesIO(bytes(_PREFIX.size))
    stream.seek(_PREFIX.size)
    packer = _Packer(stream)
    packer.dump(obj)
    tensors = [x.resolve_conj().resolve_neg().cpu().contiguous() for x in packer.tensors]
    left_out = [largest is not None and x.nbytes > largest for x in tensors]
    specs = [
        (TensorSpec(given.dtype, tuple(given.shape), given.is_cuda), out)
        for given, out in zip(packer.tensors, left_out, strict=True)
    ]
    middle = stream.tell()
    pickle.dump(specs, stream, protocol=pickle.HIGHEST_PROTOCOL)
    head = stream.getbuffer()
    _PREFIX.pack_into(head, 0, middle, len(head))
    parts = [torch.frombuffer(head, dtype=torch.uint8)]
    parts += [wire.as_bytes(x) for x, out in zip(tensors, left_out, strict=True) if not out]
    flat = torch.cat(parts) if len(parts) > 1 else parts[0]
    return flat, [x for x, out in zip(tensors, left_out, strict=True) if out]


def unpack(data: Tensor | bytes, device: torch.device, fetch: Callable[[TensorSpec], Tensor] | None = None) -> Any:
    """Returns the object that was packed into `data`.

    Args:
        data: a flat uint8 tensor on the CPU, or bytes.
        device: for the tensors that were on a GPU.
        fetch: returns, in order, the tensors that were left out.
    """
    memory = memoryview(data if isinstance(data, bytes) else data.numpy().data)
    middle, start = _PREFIX.unpack_from(memory)
    tensors = []
    for spec, left_out in pickle.loads(memory[middle:start]):
        if left_out:
            assert fetch is not None, "the object was packed without its large tensors"
            x = fetch(spec)
        else:
            x = spec.empty()  # not a view: it would keep all of `data` alive
            wire.as_bytes(x).numpy().data[:] = memory[start : start + spec.nbytes]
            start += spec.nbytes
        tensors.append(x.to(device) if spec.on_gpu else x)
    pickled = memory[_PREFIX.size : middle]
    return _Unpacker(io.BytesIO(pickled), tensors).load() if tensors else pickle.loads(pickled)


def try_pack(obj: Any) -> tuple[Tensor | None, str | None]:
    """Returns `obj` as a flat tensor, or the problem with it."""
    try:
        return pack(obj)[0], None
    except Exception as error:  # pickling runs code of the object, which may raise anything
        return None, f"expected an object that pickles, got {type(obj).__name__}: {error}"


def pack_each(objs: Any, size: int) -> tuple[list[Tensor], str | None]:
    """Returns a flat tensor per rank, or the problem with `objs`."""
    if not isinstance(objs, list | tuple) or len(objs) != size:
        return [], f"expected a list or tuple of {size} objects, one per rank, got {describe(objs)}"
    parts: list[Tensor] = []
    for index, obj in enumerate(objs):
        data, problem = try_pack(obj)
        if data is None:
            return [], f"element {index}: {problem}"
        parts.append(data)
    return parts, None


class _Packer(pickle.Pickler):
    """Pickles an object with an index for each tensor, and collects the tensors."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not _is_plain(obj):
            return NotImplemented
        self.tensors.append(obj)
        return _tensor, (len(self.tensors) - 1,)


class _Unpacker(pickle.Unpickler):
    """Unpickles an object, and replaces indices by their tensors."""

    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        is_tensor = module == __name__ and name == _tensor.__name__
        return self._tensors.__getitem__ if is_tensor else super().find_class(module, name)


def _tensor(index: int) -> Tensor:
    """Represents a tensor in the pickle; `_Unpacker` replaces it."""
    raise NotImplementedError


def _is_plain(x: Tensor) -> bool:
    """Returns whether bytes, dtype and shape describe `x` completely; other tensors are pickled by torch."""
    plain = x.layout is torch.strided and not x.is_nested and not x.requires_grad and x.dtype in wire.DTYPE_CODES
    return plain and (x.is_cpu or x.is_cuda)
