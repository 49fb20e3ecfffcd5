"""Reads and writes tensors as safetensors files, and computes their digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torchmn.training.checkpoint.manifest import DamagedCheckpoint

# Supported by every release of safetensors. Others are stored as bytes, with their dtype in the manifest.
_PLAIN = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}

_DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


def digest(x: Tensor) -> str:
    """Returns a digest of dtype, shape and all bits of `x`, which is contiguous and on the CPU."""
    result = blake2b(f"{x.dtype} {tuple(x.shape)}".encode(), digest_size=16)
    if x.numel():
        result.update(_as_bytes(x).numpy().data)
    return result.hexdigest()


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes contiguous tensors on the CPU to a safetensors file."""
    stored = {name: _unshared(x if x.dtype in _PLAIN else _as_bytes(x)) for name, x in tensors.items()}
    try:
        save_file(stored, path)
    except SafetensorError as error:  # its message does not name the file
        raise OSError(f"cannot write {str(path)!r}: {error}") from error


def read(path: Path, wanted: Sequence[tuple[dict[str, Any], str]]) -> dict[str, Tensor]:
    """Returns copies of the tensors with these specs and digests, by path.

    Raises `DamagedCheckpoint` if the file is not as written; other errors if the specs are not.
    """
    result: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for spec, expected in wanted:
                name = spec["!tensor"]
                # Cloned, because safetensors maps the file into memory, which may be removed later.
                x = _restored(file.get_tensor(name).clone(), spec)
                if x is None or digest(x) != expected:
                    raise DamagedCheckpoint(f"{path.name}: the checksum of {name!r} is wrong")
                result[name] = _with_layout(x, spec)
    except (OSError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path.name}: {error}") from error
    return result


def _restored(stored: Tensor, spec: Mapping[str, Any]) -> Tensor | None:
    """Returns `stored` with the dtype and shape of the spec, or None if it does not fit."""
    dtype, shape = _DTYPES[spec["dtype"]], tuple(spec["shape"])
    if stored.dtype == dtype and tuple(stored.shape) == shape:
        return stored
    if stored.dtype != torch.uint8 or stored.numel() != prod(shape) * dtype.itemsize:
        return None
    return stored.view(dtype).view(shape) if stored.numel() else torch.empty(shape, dtype=dtype)


def _with_layout(x: Tensor, spec: Mapping[str, Any]) -> Tensor:
    if "stride" not in spec:
        return x
    if sum((n - 1) * s for n, s in zip(x.shape, spec["stride"], strict=True)) >= max(x.numel(), 1):
        raise ValueError(f"strides {spec['stride']} leave gaps")  # might need any amount of memory
    return torch.empty_strided(x.shape, spec["stride"], dtype=x.dtype).copy_(x)


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8) if x.numel() else torch.empty(0, dtype=torch.uint8)


def _unshared(x: Tensor) -> Tensor:
    """Returns `x`, copied if it is a part of a larger storage: safetensors refuses tensors that share memory."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()
