"""Writes tensors to safetensors files, maps such files into memory, and computes the digests of tensors.

A safetensors file is the length of its header (8 bytes), the header (JSON: dtype, shape and place of each tensor), and
the bytes of the tensors without gaps.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, shake_256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchmn.training.checkpoint.manifest import DamagedCheckpoint
from torchmn.training.checkpoint.state_copy import Place, StateCopy

# Of every release of safetensors. Other dtypes are stored as bytes, with their dtype in the manifest.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BYTES = _NAMES[torch.uint8]
_DTYPE_NAMES = {x: str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_json_text = json.JSONEncoder().encode
_LENGTH = 8  # bytes of the length of the header

_ROW = 1 << 14  # bytes that are summed up
_BLOCK = 16 * _ROW  # bytes that are processed together, in the cache of the processor
# Any odd numbers, the same everywhere and in all versions.
_WEIGHTS = np.frombuffer(shake_256(b"torchmn checkpoint 2").digest(_ROW), "<u8") | np.uint64(1)


def digest(data: np.ndarray) -> str:
    """Returns a digest of bytes, at about the speed of memory.

    The last bytes are hashed. Of each row before them, a sum of its words is hashed, each word multiplied by a weight
    of its place. Before that, the upper half of a word is mixed into its lower half, because the upper bits of a factor
    change only the upper bits of a product. A change of one word always changes the sum; any other change leaves the
    sum of a row the same with a probability of about 2**-32 at most.
    """
    result = blake2b(digest_size=16)
    end = data.size - data.size % _ROW
    if end:
        memory = np.empty((min(end, _BLOCK) // _ROW, _WEIGHTS.size), "<u8")
        for start in range(0, end, _BLOCK):
            words = data[start : min(start + _BLOCK, end)].view("<u8").reshape(-1, _WEIGHTS.size)
            mixed = np.right_shift(words, 31, out=memory[: len(words)])
            mixed ^= words
            result.update(np.einsum("ij,j->i", mixed, _WEIGHTS).astype("<u8").data)
    result.update(data[end:].data)
    return result.hexdigest()


def description(place: Place, data: np.ndarray) -> str:
    """Returns dtype, shape and digest of a tensor as text, such as "float32 2x3 00112233445566778899aabbccddeeff"."""
    return f"{_DTYPE_NAMES[place.dtype]} {'x'.join(map(str, place.shape))} {digest(data)}"


def _full_digest(dtype: torch.dtype, shape: tuple[int, ...], data: np.ndarray) -> str:
    """Returns the digest of format 1: a hash of dtype, shape and all bytes."""
    result = blake2b(f"{dtype} {shape}".encode(), digest_size=16)
    result.update(data.data)
    return result.hexdigest()


def write(path: Path, copy: StateCopy, names: Container[str]) -> WrittenFile:
    """Writes tensors of a copy to a new file, and returns once they are on disk.

    Args:
        path: of the file.
        copy: the tensors.
        names: of the tensors to write.
    """
    places = {name: place for name, place in copy.places.items() if name in names}
    header = _header_of(places)
    try:
        with path.open("xb") as file:
            file.write(len(header).to_bytes(_LENGTH, "little") + header)
            for start, stop in _runs(places.values()):
                file.write(copy.memory[start:stop].data)
            file.flush()
            os.fsync(file.fileno())
            return WrittenFile(file.tell(), header_digest(header))
    except OSError as error:
        raise OSError(f"cannot write {str(path)!r}: {error}") from error


class WrittenFile(NamedTuple):
    """Size of a file in bytes, and digest of its header."""

    size: int
    header: str


def header_digest(header: bytes) -> str:
    """Returns a digest of the header of a file."""
    return blake2b(header, digest_size=16).hexdigest()


def _header_of(places: Mapping[str, Place]) -> bytes:
    """Returns the header as JSON; not from dicts, of which many would set off garbage collections."""
    entries, end = [], 0
    for name, place in places.items():
        begin, end = end, end + place.stop - place.start
        plain = _NAMES.get(place.dtype)
        shape = [end - begin] if plain is None else [*place.shape]
        entries.append(
            f'{_json_text(name)}:{{"dtype":"{plain or _BYTES}","shape":{shape},"data_offsets":[{begin},{end}]}}'
        )
    text = f"{{{','.join(entries)}}}".encode()
    return text + b" " * (-(_LENGTH + len(text)) % 64)  # tensors are aligned when the file is mapped into memory


def _runs(places: Iterable[Place]) -> Iterator[tuple[int, int]]:
    """Yields start and stop of adjacent places."""
    begin = end = 0
    for place in places:
        if place.start != end:
            yield begin, end
            begin = place.start
        end = place.stop
    yield begin, end


class Wanted(NamedTuple):
    """A tensor to read.

    Attributes:
        spec: of the tree.
        description: of the manifest; a digest in format 1, in which `spec` has dtype and shape.
        mapped: whether it may be mapped memory; otherwise it does not depend on the file.
    """

    spec: Mapping[str, Any]
    description: str
    mapped: bool


def read(path: Path, header: str | None, wanted: Mapping[str, Wanted]) -> dict[str, Tensor]:
    """Returns tensors of a file by name.

    Raises `DamagedCheckpoint` if the file is not as written; other errors if it is not a safetensors file, or if a spec
    or description is not as `save` writes it.

    Args:
        path: of the file.
        header: digest of its header; None in format 1.
        wanted: the tensors by name.
    """
    try:
        with path.open("rb") as file:
            # Private and writable, as torch requires of memory; nothing writes to it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path.name}: {error}") from error
    start = _LENGTH + int.from_bytes(mapped[:_LENGTH], "little")
    text = mapped[_LENGTH:start]
    if header is not None and header_digest(text) != header:
        raise DamagedCheckpoint(f"{path.name}: the checksum of its header is wrong")
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path.name}: its header is damaged: {error!r}") from error
    memory = np.frombuffer(mapped, np.uint8)
    stored: dict[str, Stored] = {}
    for name, tensor in wanted.items():
        found = _stored(tensor, start, entries.get(name), header is None)
        if found is None or found.stop > memory.size:
            raise DamagedCheckpoint(f"{path.name}: it has no {name!r} with the dtype and shape of the manifest")
        stored[name] = found
    damaged = _damaged(stored, memory, header is None)
    if damaged is not None:
        raise DamagedCheckpoint(f"{path.name}: the checksum of {damaged!r} is wrong")
    return {name: _tensor(wanted[name], found, mapped, memory) for name, found in stored.items()}


class Stored(NamedTuple):
    """A tensor in a file: bytes `start` to `stop`, which should have this digest."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str


def _stored(wanted: Wanted, data: int, entry: Mapping[str, Any] | None, in_format_1: bool) -> Stored | None:
    """Returns a tensor in a file, given its entry in the header and where data begin; None if they do not fit."""
    if entry is None:
        return None
    if in_format_1:
        dtype, shape, expected = _DTYPES[wanted.spec["dtype"]], tuple(wanted.spec["shape"]), wanted.description
    else:
        words = wanted.description.split(" ")
        dtype, shape, expected = _DTYPES[words[0]], tuple([int(n) for n in words[1].split("x") if n]), words[2]
    begin, end = entry["data_offsets"]
    plain = _NAMES.get(dtype)
    expected_entry = (_BYTES, [end - begin]) if plain is None else (plain, [*shape])
    fits = end - begin == prod(shape) * dtype.itemsize and 0 <= begin <= end
    if not fits or (entry["dtype"], entry["shape"]) != expected_entry:
        return None
    return Stored(dtype, shape, data + begin, data + end, expected)


def _damaged(stored: Mapping[str, Stored], memory: np.ndarray, in_format_1: bool) -> str | None:
    """Returns the name of a tensor whose digest is wrong, or None. Uses as many threads as torch, but at least two."""

    def is_whole(each: Stored) -> bool:
        data = memory[each.start : each.stop]
        return each.digest == (_full_digest(each.dtype, each.shape, data) if in_format_1 else digest(data))

    large = {name: each for name, each in stored.items() if each.stop - each.start > _BLOCK}
    with ThreadPoolExecutor(max(2, torch.get_num_threads())) as pool:
        are_whole = zip(large, pool.map(is_whole, large.values()), strict=True)
        damaged = next((name for name, whole in are_whole if not whole), None)
    if damaged is not None:
        return damaged
    return next((name for name, each in stored.items() if name not in large and not is_whole(each)), None)


def _tensor(wanted: Wanted, stored: Stored, mapped: mmap.mmap, memory: np.ndarray) -> Tensor:
    dtype, shape, start, stop, _ = stored
    if start == stop:
        x = torch.empty(shape, dtype=dtype)
    elif start % dtype.itemsize:  # in format 1
        x = torch.from_numpy(memory[start:stop].copy()).view(dtype).view(shape)
    else:
        x = torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=start).view(shape)
        x = x if wanted.mapped else x.clone()
    return _with_layout(x, wanted.spec)


def _with_layout(x: Tensor, spec: Mapping[str, Any]) -> Tensor:
    if "stride" not in spec:
        return x
    if sum((n - 1) * s for n, s in zip(x.shape, spec["stride"], strict=True)) >= max(x.numel(), 1):
        raise ValueError(f"strides {spec['stride']} leave gaps")  # might need any amount of memory
    return torch.empty_strided(x.shape, spec["stride"], dtype=x.dtype).copy_(x)
