"""Python objects as tensors of bytes: anything that pickles, None too, of any size."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from torchmn.communicators.checks import describe

# torch pickles tensors of other dtypes (uint16, float8, ...), too, but can not load what it has pickled.
_LOADED_BY_TORCH = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.dtype in _LOADED_BY_TORCH or obj.layout is not torch.strided or obj.is_cuda:
            return NotImplemented
        if obj.is_quantized:  # torch knows how, with its scales
            return NotImplemented
        flat = obj.detach().resolve_conj().resolve_neg().reshape(-1)
        return _with_dtype, (flat.view(torch.uint8), obj.dtype, tuple(obj.shape))


def _with_dtype(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return data.view(dtype).view(shape)


def pickled(obj: Any) -> Tensor:
    """`obj` as a uint8 tensor, pickled straight into the tensor's memory."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def unpickled(data: Tensor) -> Any:
    """The object in a uint8 tensor."""
    return pickle.loads(data.numpy().data)


def try_pickled(obj: Any) -> tuple[Tensor | None, str | None]:
    """`obj` pickled, or the problem with it."""
    try:
        return pickled(obj), None
    except Exception as error:  # pickling runs the object's own code, which may raise anything
        return None, f"expected an object that pickles, got {type(obj).__name__}: {error}"


def pickled_parts(objs: Any, size: int) -> tuple[list[Tensor], str | None]:
    """One pickled tensor per rank, or the problem with `objs`."""
    if not isinstance(objs, list | tuple) or len(objs) != size:
        return [], f"expected a list or tuple of {size} objects, one per rank, got {describe(objs)}"
    parts: list[Tensor] = []
    for place, obj in enumerate(objs):
        data, problem = try_pickled(obj)
        if data is None:
            return [], f"element {place}: {problem}"
        parts.append(data)
    return parts, None
