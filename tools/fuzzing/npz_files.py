"""Damaged .npz files: damaged arrays in sound archives, and damaged archives."""

from __future__ import annotations

import functools
import io
import random
import struct
import zipfile
import zlib

import numpy as np

from tools.fuzzing.mutations import NUMBERS, extent, mutated, packed_zeros

NAMES = ("x_train", "y_train", "x_test", "y_test")
_DTYPES = (
    "f4", "f8", "f2", "u1", "i8", "u8", "?", ">f4", ">i2", "c8", "g", "G", "O", "U3", "S3", "M8[s]", "m8[D]", "V4",
    "f4,f4", "(2,)f4", "U0", "S0", "V0", "|O8", "i1,O", "T", "x", "", "i4,(1000000000000)f4",
)  # fmt: skip

_HEADERS = (
    "(" * 100, "(" * 5000, "[" * 3000 + "]" * 3000, "-" * 9000 + "1", "{'shape': 9**9**9}", "\xff" * 40, "{" * 200,
    "'" + "\\x41" * 500, "9" * 9000, "",
)  # fmt: skip


def npz_file(draw: random.Random) -> bytes:
    """Returns the content of a damaged .npz file."""
    members = {name: _npy(_array(name)) for name in (NAMES if draw.random() < 0.3 else NAMES[:2])}
    kind = draw.random()
    if kind < 0.003:
        return draw.choice(_bombs())
    if kind < 0.6:
        name = draw.choice(list(members))
        members[name] = _damaged(draw, members[name])
    whole = _archive(draw, members)
    return whole if 0.003 <= kind < 0.5 else mutated(draw, whole, (whole,))


def _array(name: str) -> np.ndarray:
    return np.arange(4) if name[0] == "y" else np.arange(48, dtype=np.float32).reshape(4, 12)


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _damaged(draw: random.Random, content: bytes) -> bytes:
    """Returns a file of one array with another header, other values, or changed bytes."""
    kind = draw.random()
    if kind < 0.2:
        return mutated(draw, content)
    if kind < 0.5:
        return _npy(_other_array(draw))
    shape = tuple(extent(draw) for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 40))))
    words = {
        "descr": draw.choice((repr(draw.choice(_DTYPES)), repr([("a", draw.choice(_DTYPES))]), "'<f4'", "'<f4'", "7")),
        "fortran_order": draw.choice(("False", "True", "None", "7")),
        "shape": draw.choice((str(shape), str(shape), "(4, 12)", str(list(shape)), "(4, -12)", "'x'", "(1.5,)")),
    }
    if draw.random() < 0.2:
        words.pop(draw.choice(list(words)))
    text = "{" + ", ".join(f"{name!r}: {word}" for name, word in words.items()) + ", }\n"
    if draw.random() < 0.2:
        text = draw.choice(_HEADERS)
    version = draw.choice(((1, 0), (1, 0), (2, 0), (3, 0), (0, 0), (9, 9)))
    encoded = text.encode("latin1")
    announced = draw.choice((len(encoded), len(encoded), len(encoded), draw.choice(NUMBERS)))
    size = struct.pack("<H", announced % 2**16) if version == (1, 0) else struct.pack("<I", announced % 2**32)
    return b"\x93NUMPY" + bytes(version) + size + encoded + bytes(draw.choice((0, 16, 192, 192, 384)))


def _other_array(draw: random.Random) -> np.ndarray:
    shape = draw.choice(((4, 12), (4,), (4, 1), (0, 12), (0,), (), (4, 2, 3), (3, 12), (1,) * 30))
    values = np.full(shape, draw.choice((0, 1, -1, 255, np.nan, np.inf, 3e38, 2**40)))
    with np.errstate(all="ignore"):
        for name in (draw.choice(_DTYPES), "f8"):
            try:
                return values.astype(name)
            except (TypeError, ValueError):
                continue
    return values


def _archive(draw: random.Random, members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    method = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            unusual = draw.random() < 0.02
            entry = zipfile.ZipInfo(_entry_name(draw, name) if unusual else f"{name}.npy")
            entry.compress_type = draw.choice((method, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)) if unusual else method
            archive.writestr(entry, content)
            if draw.random() < 0.02:
                archive.writestr(f"{name}.npy", draw.choice((content, b"", content[:20])))
        if draw.random() < 0.02:
            archive.writestr(draw.choice(("x_train", "inner.npz", "../x.npy", "a/", "\xe9.npy")), file.getvalue())
    whole = file.getvalue()
    return _changed_directory(draw, whole) if draw.random() < 0.15 else whole


def _entry_name(draw: random.Random, name: str) -> str:
    return draw.choice((name, f"{name}.npy/", f"/{name}.npy", f"{name}.NPY", f"{name}.npy.npy", ".npy", "x" * 60_000))


def _changed_directory(draw: random.Random, whole: bytes) -> bytes:
    """Overwrites a field of a local header, of the directory, or of its end."""
    fields = {  # of (offset, size)
        b"PK\x03\x04": ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
        b"PK\x01\x02": ((6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)),
        b"PK\x05\x06": ((4, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    }
    for _ in range(draw.choice((1, 1, 2, 3))):
        magic = draw.choice(list(fields))
        found = [at for at in range(len(whole)) if whole.startswith(magic, at)]
        if not found:
            continue
        offset, size = draw.choice(fields[magic])
        at = draw.choice(found) + offset
        bits = 8 * size
        value = draw.choice((draw.choice(NUMBERS) % 2**bits, 1 << draw.randrange(bits), draw.randrange(100)))
        whole = whole[:at] + value.to_bytes(size, "little") + whole[at + size :]
    return whole


@functools.cache
def _bombs() -> tuple[bytes, ...]:
    """Returns archives of 300 MB of zeros, with different sizes in the directory and the header, and one of 28 MB."""
    result, most = [], 300 << 20
    sizes = (300, most, 4), (300, 1000, 4), (300, 2**32 - 2, 4), (300, most, most), (28, 28 << 20, 28 << 20)
    for megabytes, announced, rows in sizes:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (rows, 1)})
        begin = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = begin.compress(header.getvalue()) + begin.flush(zlib.Z_FULL_FLUSH) + packed_zeros(megabytes)[0]
        checksum, size = zlib.crc32(header.getvalue()), len(header.getvalue()) + (megabytes << 20)
        for _ in range(megabytes):
            checksum = zlib.crc32(bytes(1 << 20), checksum)
        announced = size if announced == megabytes << 20 else announced
        result.append(_zip_of(packed, checksum, announced))
    return tuple(result)


def _zip_of(packed: bytes, checksum: int, size: int) -> bytes:
    """Returns an archive of a compressed x_train, and of the same y_train, with these checksums and sizes."""
    files = entries = b""
    for name in (b"x_train.npy", b"y_train.npy"):
        head = struct.pack("<5H3I2H", 20, 0, 8, 0, 33, checksum, len(packed), size, len(name), 0)
        entries += b"PK\x01\x02" + struct.pack("<H", 20) + head + struct.pack("<3H2I", 0, 0, 0, 0, len(files)) + name
        files += b"PK\x03\x04" + head + name + packed
    return files + entries + b"PK\x05\x06" + struct.pack("<4H2IH", 0, 0, 2, 2, len(entries), len(files), 0)
