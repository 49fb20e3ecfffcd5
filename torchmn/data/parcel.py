"""Any Python object as one flat tensor: its tensors as they lie in memory, the rest of it pickled.

Pickling a tensor would copy it more than once, and pickling a slice takes the whole tensor along that it is a
slice of. Here the pickle holds numbers where the object holds tensors, and the tensors follow behind it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators import wire
from torchmn.communicators.wire import TensorSpec

# A view as another dtype must start at a multiple of its size; complex128 has the largest.
_ALIGNMENT = 16

Manifest = tuple[bytes, list[tuple[TensorSpec, bool]]]
"""The pickle, and for each tensor of the object what it is and whether it travels apart from the parcel."""


def pack(obj: Any, largest: int | None = None) -> tuple[Tensor, list[Tensor]]:
    """`obj` as a flat uint8 tensor, and the tensors of more than `largest` bytes that it left out, in order.

    Raises whatever pickling raises if the object can not be pickled.
    """
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(obj)
    tensors = [_plain(x) for x in packer.tensors]
    apart = [largest is not None and x.nbytes > largest for x in tensors]
    specs = [
        TensorSpec(x.dtype, tuple(x.shape), given.is_cuda) for x, given in zip(tensors, packer.tensors, strict=True)
    ]
    manifest: Manifest = (stream.getvalue(), list(zip(specs, apart, strict=True)))
    head = pickle.dumps(manifest, protocol=pickle.HIGHEST_PROTOCOL)
    end = _aligned(8 + len(head))
    inside = [x for x, left_out in zip(tensors, apart, strict=True) if not left_out]
    flat = torch.empty(end + sum(_aligned(x.nbytes) for x in inside), dtype=torch.uint8)
    flat[:8].view(torch.int64)[0] = len(head)
    flat[8 : 8 + len(head)] = wire.from_bytes(head)
    for x in inside:
        if x.numel():
            flat[end : end + x.nbytes] = wire.as_bytes(x)
        end += _aligned(x.nbytes)
    return flat, [x for x, left_out in zip(tensors, apart, strict=True) if left_out]


def unpack(flat: Tensor, device: torch.device, fetch: Callable[[TensorSpec], Tensor] | None = None) -> Any:
    """The object in a parcel; its tensors own their memory, and those that left a GPU are put on `device`.

    `fetch` is asked, in order, for the tensors that were left out.
    """
    length = int(flat[:8].view(torch.int64)[0])
    structure, contents = pickle.loads(flat[8 : 8 + length].numpy().data)
    start = _aligned(8 + length)
    tensors = []
    for spec, left_out in contents:
        if left_out:
            assert fetch is not None, "a parcel that does not hold all its tensors"
            x = fetch(spec)
        else:
            # A copy: who keeps one small tensor must not keep the whole parcel in memory.
            x = flat[start : start + spec.nbytes].view(spec.dtype).view(spec.shape).clone()
            start += _aligned(spec.nbytes)
        tensors.append(x.to(device) if spec.on_gpu else x)
    return _Unpacker(structure, tensors).load()


class _Packer(pickle.Pickler):
    """Pickles an object, puts its plain tensors aside and writes their numbers in their place."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or not _travels(obj):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)  # which also keeps its id from being given to another tensor
        return number


class _Unpacker(pickle.Unpickler):
    def __init__(self, structure: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _travels(x: Tensor) -> bool:
    """Whether bytes, dtype and shape are all there is to know of `x`; torch's own pickle knows the rest."""
    plain = x.layout is torch.strided and not x.is_nested and not x.requires_grad and x.dtype in wire.DTYPE_CODES
    return plain and (x.is_cpu or x.is_cuda)


def _plain(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
