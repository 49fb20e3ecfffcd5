"""Damaged files of data sets, one `Subject` for each format that a reader of `torchmn.datasets` has."""

from __future__ import annotations

import functools
import gzip
import io
import itertools
import pickle
import pickletools
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tools.fuzzing.mutations import NUMBERS, decimal, extent, gzip_of_zeros, mutated, packed_zeros
from tools.fuzzing.npz_files import npz_file
from tools.fuzzing.subject import Subject
from torchmn import datasets
from torchmn.datasets.load_cifar10 import cifar10_arrays
from torchmn.datasets.load_cifar100 import cifar100_arrays
from torchmn.datasets.load_mnist import mnist_arrays
from torchmn.errors import DatasetError

SECTION = "data sets"
BOMB = 300  # MB


def _used(*found: datasets.Arrays | datasets.ImageSet | None) -> None:
    """Takes samples of data sets, as a training does: a reader must not return what cannot be used."""
    for data in found:
        if isinstance(data, datasets.Arrays):
            inputs, targets = data.take(np.arange(min(len(data), 3)))
            assert len(inputs) == len(targets) == min(len(data), 3) > 0
        elif data is not None:
            assert len(data) > 0 and len(data[len(data) - 1]) == 2


# -- IDX -------------------------------------------------------------------------------------------------------------

LABELS = struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes([7, 0, 9])
IMAGES = struct.pack(">4B3I", 0, 0, 8, 3, 3, 28, 28) + bytes(range(196)) * 12


def _idx(draw: random.Random) -> bytes:
    if draw.random() < 0.6:
        return mutated(draw, IMAGES, (LABELS, IMAGES))
    shape = [draw.choice((3, 28, extent(draw))) % 2**32 for _ in range(draw.choice((3, 3, 3, 1, 2, 4)))]
    kind, dims = draw.choice((8, 8, 8, 9, 13)), draw.choice((3, len(shape)))
    return struct.pack(f">4B{len(shape)}I", 0, 0, kind, dims, *shape) + IMAGES[16 : draw.choice((16, 17, 800, None))]


@functools.cache
def _gzip_bombs() -> tuple[bytes, ...]:
    result = [gzip_of_zeros(IMAGES, BOMB), gzip_of_zeros(IMAGES[:16], BOMB)]
    for megabytes in (BOMB, 49):  # of black images; 49 MB are 65,536 of them, and may be
        result.append(gzip_of_zeros(struct.pack(">4B3I", 0, 0, 8, 3, (megabytes << 20) // 784, 28, 28), megabytes))
    return tuple(result)


def _idx_gz(draw: random.Random) -> bytes:
    kind = draw.random()
    if kind < 0.003:
        return draw.choice(_gzip_bombs())
    packed = gzip.compress(_idx(draw) if kind < 0.5 else IMAGES, draw.choice((0, 1, 9)), mtime=0)
    if kind < 0.4:
        return packed
    if kind < 0.55:
        return packed + draw.choice((packed, b"\0" * 100, b"x", packed[:15], gzip.compress(packed)))
    if kind < 0.6:
        return gzip.compress(packed)
    if kind < 0.65:  # flags of the header: a name, a comment, a checksum, more fields
        return packed[:3] + bytes([draw.randrange(256)]) + packed[4:]
    return mutated(draw, packed, (packed, IMAGES))


def _read_mnist(path: Path) -> None:
    (path.parent / "t10k-labels-idx1-ubyte").write_bytes(LABELS)
    _both(lambda: datasets.mnist("test", path.parent), lambda: mnist_arrays("test", path.parent))


def _read_labels(path: Path) -> None:
    (path.parent / "t10k-images-idx3-ubyte").write_bytes(IMAGES)
    _both(lambda: datasets.mnist("test", path.parent), lambda: mnist_arrays("test", path.parent))


def _labels(draw: random.Random) -> bytes:
    content = mutated(draw, LABELS, (IMAGES, LABELS))
    return gzip.compress(content) if draw.random() < 0.3 else content


def _both(*reads: Callable[[], datasets.Arrays | datasets.ImageSet]) -> None:
    """Reads a file in two ways; raises the error of the first, after the others."""
    errors = []
    for read in reads:
        try:
            _used(read())
        except DatasetError as error:
            errors.append(error)
    if errors:
        assert len(errors) == len(reads), f"one of {len(reads)} readers raised {errors[0]}"
        raise errors[0]


# -- CIFAR -----------------------------------------------------------------------------------------------------------

PIXELS = bytes(range(256)) * 12


def _records(labels: int) -> Callable[[random.Random], bytes]:
    def content(draw: random.Random) -> bytes:
        whole = b"".join(bytes([draw.randrange(10)] * labels) + PIXELS for _ in range(draw.choice((1, 2, 3))))
        if draw.random() < 0.3:  # whole records, so that labels are compared
            at = draw.randrange(len(whole))
            return whole[:at] + bytes([draw.randrange(256)]) + whole[at + 1 :]
        return mutated(draw, whole, (PIXELS,))

    return content


def _pickled(names: Sequence[str]) -> Callable[[random.Random], bytes]:
    def content(draw: random.Random) -> bytes:
        count = draw.choice((1, 2, 2))
        data = np.frombuffer(PIXELS * count, np.uint8).reshape(count, 3072)
        batch: dict = {name: list(range(count)) for name in names} | {"data": data}
        whole = pickle.dumps(batch, draw.choice((0, 2, 2, 2, 4, 5)))
        kind = draw.random()
        if kind < 0.35:
            name = draw.choice(list(batch))
            return pickle.dumps({**batch, name: _python_value(draw, data)}, draw.choice((2, 4, 5)))
        if kind < 0.45:
            return pickle.dumps(_python_value(draw, data), 2)
        if kind < 0.7:
            return _operations(draw, whole)
        return mutated(draw, whole, (whole,))

    return content


def _python_value(draw: random.Random, data: np.ndarray) -> object:
    loop: list = []
    loop.append(loop)
    return draw.choice((
        None, -1, 2**70, 1.5, "x", b"x", [], {}, (), [None], [[1], [2]], [1.5, 2], ["1"], [-1, 256], [True, False],
        {1, 2}, loop, data.T, data[:, :5], data[:0], data.astype("f4"), data.astype(object), data.reshape(-1),
        data.reshape(1, -1, 1), np.asfortranarray(data), data.astype("u1"), np.uint8(3), np.array("x"), range(3),
        np.array(["a", "b"]), np.zeros(2, "u1,u1"), np.zeros(2, "M8[s]"), list(data[:, :1]), [2**62] * 3, len,
        Path("x"),
    ))  # fmt: skip


_OPERATIONS = (
    b"0", b"2", b"(", b"}", b"]", b")", b"N", b"a", b"s", b"u", b"e", b"R", b"b", b"\x81", b"\x92", b"t", b"\x8f",
    b"r\xff\xff\xff\x7f", b"j\0\0\0\1", b"q\xff", b"cos\nsystem\n", b"c__builtin__\neval\n", b"\x94", b"Q", b".",
    b"\x8e" + b"\xff" * 8, b"\x96" + b"\xff" * 7 + b"\0", b"\x8b\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8,
    b"I99999999999999999999\n", b"L" + b"9" * 5000 + b"L\n", b"F1e999\n", b"P1\n", b"i__main__\nx\n", b"\x93",
)  # fmt: skip


def _operations(draw: random.Random, whole: bytes) -> bytes:
    """Drops, doubles or moves whole operations of a pickle, or inserts others."""
    places = [position or 0 for _, _, position in pickletools.genops(whole)] + [len(whole)]
    parts = [whole[begin:end] for begin, end in itertools.pairwise(places)]
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randrange(len(parts) + 1)
        choice = draw.random()
        if choice < 0.4:
            parts.insert(at, draw.choice(_OPERATIONS) * draw.choice((1, 1, 2, 3000)))
        elif choice < 0.6:
            parts[at : at + 1] = []
        elif choice < 0.8 and parts:
            parts.insert(at, draw.choice(parts))
        else:
            parts[at : at + 1] = [draw.choice(_OPERATIONS)]
    return b"".join(parts)


def _read_cifar10(path: Path) -> None:
    _both(lambda: datasets.cifar10("test", path.parent), lambda: cifar10_arrays("test", path.parent))


def _read_cifar100(path: Path) -> None:
    errors = []
    for coarse in (False, True):
        read = functools.partial(datasets.cifar100, "test", path.parent, coarse=coarse)
        try:
            _both(read, functools.partial(cifar100_arrays, "test", path.parent, coarse))
        except DatasetError as error:
            errors.append(error)
    if errors:
        raise errors[0]


# -- MATLAB ----------------------------------------------------------------------------------------------------------


def _element(kind: int, data: bytes, order: str, announced: int | None = None) -> bytes:
    size = len(data) if announced is None else announced % 2**32
    if 0 < len(data) <= 4 and announced is None:
        return struct.pack(f"{order}I", len(data) << 16 | kind) + data.ljust(4, b"\0")
    return struct.pack(f"{order}II", kind % 2**32, size) + data + b"\0" * (-len(data) % 8)


def _compressed(data: bytes, order: str) -> bytes:
    packed = zlib.compress(data, 1)
    return struct.pack(f"{order}II", 15, len(packed)) + packed


@functools.cache
def _matlab_bombs() -> tuple[bytes, ...]:
    zeros, _ = packed_zeros(BOMB)
    result = []
    sizes = (BOMB << 20, 1), (50 << 20, 1), (1000, 1), (2**32 - 1, 1), (BOMB << 20, 1200), (60 << 20, 240)
    for announced, images in sizes:
        head = zlib.compressobj(9, zlib.DEFLATED, -15)
        start = _element(6, struct.pack("<II", 6, 0), "<") + _element(5, struct.pack("<3I", SIDE, SIDE, images), "<")
        start += _element(1, b"x", "<") + struct.pack("<II", 2, SIDE * SIDE * images)
        begin = head.compress(struct.pack("<II", 14, announced) + start)
        packed = b"\x78\x9c" + begin + head.flush(zlib.Z_FULL_FLUSH) + zeros
        result.append(struct.pack("<II", 15, len(packed)) + packed)
    return tuple(result)


SIDE = 512
_IMAGE = bytes(range(256)) * (SIDE * SIDE // 256)


def _matlab(draw: random.Random) -> bytes:
    order = draw.choice("<<<>")
    head = b"MATLAB 5.0 MAT-file".ljust(124, b" ") + struct.pack(f"{order}HH", 0x0100, 0x4D49)
    kind = draw.random()
    if kind < 0.003:
        return head + draw.choice(_matlab_bombs())
    dims = [SIDE, SIDE, 1] if kind < 0.8 else [extent(draw) for _ in range(draw.choice((0, 1, 2, 3, 3, 4, 40)))]
    values = _IMAGE if draw.random() < 0.8 else bytes(draw.choice((0, 1, 8, 100, 784)))
    parts = [
        _element(6, struct.pack(f"{order}II", draw.choice((6, 1, 2, 4, 5, 9, 0x806)), 0), order),
        _element(5, b"".join(struct.pack(f"{order}I", n % 2**32) for n in dims), order),
        _element(1, draw.choice((b"IMAGES", b"", b"\xff" * 5, b"x" * 300)), order),
        _element(draw.choice((2, 2, 2, 9, 7, 0, 14, 15, 16, 99)), values, order),
    ]
    if draw.random() < 0.3:
        at = draw.randrange(4)
        parts[at] = draw.choice((
            b"", parts[at] * 2, _element(draw.randrange(20), b"abc", order, draw.choice(NUMBERS)), parts[at][:9],
            mutated(draw, parts[at]) if at < 3 else b"",
        ))  # fmt: skip
    matrix = _element(14, b"".join(parts), order, draw.choice((*[None] * 6, draw.choice(NUMBERS))))
    for _ in range(draw.choice((0, 0, 1, 1, 1, 1, 2, 30))):
        matrix = _compressed(matrix, order)
    whole = head + matrix * draw.choice((1, 1, 1, 1, 2))
    return whole if draw.random() < 0.6 else mutated(draw, whole, (whole[:2000],))


# -- tables, texts ---------------------------------------------------------------------------------------------------

_TABLE = "\n".join(" ".join(f"{(13 * row + column) % 97:.2f}" for column in range(14)) for row in range(506)).encode()
_BOOK = b"Call me Ishmael. Some years ago -- never mind how long precisely --\r\nhaving little or no money.\n" * 3


def _housing(draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return mutated(draw, _TABLE, (_TABLE, _BOOK))
    words = _TABLE.split(b" ")
    for _ in range(draw.choice((1, 1, 3))):
        words[draw.randrange(len(words))] = draw.choice(
            (decimal(draw).encode(), b"", b"1e39", b"0x1p3", b"1_0", b"\xd9\xa1", b"infinity", b"9" * 900_000, b"1,5")
        )
    return b" ".join(words)


def _text(draw: random.Random) -> bytes:
    return mutated(draw, draw.choice((_BOOK, _BOOK[:25], b"\xef\xbb\xbf" + _BOOK)), (_TABLE, _BOOK))


# -- images ----------------------------------------------------------------------------------------------------------

IMAGE_FORMATS = {"PNG": "png", "JPEG": "jpg", "BMP": "bmp", "GIF": "gif", "PPM": "ppm", "WEBP": "webp", "TIFF": "tif"}


@functools.cache
def _pictures(form: str) -> tuple[bytes, ...]:
    numbers = np.random.default_rng(0)
    colour = Image.fromarray(numbers.integers(0, 256, (12, 10, 3), np.uint8))
    options: list[tuple[Image.Image, dict]] = [(colour, {}), (colour.convert("L"), {}), (colour.resize((64, 64)), {})]
    if form in ("PNG", "GIF", "TIFF", "BMP"):
        options += [(colour.convert("P"), {}), (colour.convert("1"), {})]
    if form in ("PNG", "WEBP", "TIFF"):
        options.append((colour.convert("RGBA"), {}))
    if form in ("GIF", "WEBP", "PNG", "TIFF"):
        options.append((colour, {"save_all": True, "append_images": [colour] * 3}))
    if form == "JPEG":
        options += [(colour, {"progressive": True}), (colour.convert("CMYK"), {})]
    if form == "TIFF":
        options += [(colour, {"compression": name}) for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")]
    if form == "PNG":
        options.append((Image.fromarray(numbers.integers(0, 65536, (8, 8)).astype(np.uint16)), {}))
    return tuple(_saved(image, form, extra) for image, extra in options)


def _saved(image: Image.Image, form: str, options: dict) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _picture(form: str) -> Callable[[random.Random], bytes]:
    def content(draw: random.Random) -> bytes:
        pictures = _pictures(form)
        chosen = draw.choice(pictures)
        if form == "PNG" and draw.random() < 0.5:
            return _png(draw, chosen)
        if form == "PPM" and draw.random() < 0.3:
            return b"%b %b %b %b\n" % (
                draw.choice((b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"PF", b"P7")),
                *(str(extent(draw)).encode() for _ in range(3)),
            ) + chosen[13:]  # fmt: skip
        if draw.random() < 0.03:
            return draw.choice(_pictures(draw.choice(list(IMAGE_FORMATS))))
        return mutated(draw, chosen, pictures)

    return content


@functools.cache
def _chunk_bomb() -> bytes:
    return b"x\0\0\x78\x9c" + packed_zeros(BOMB)[0]


_CHUNKS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"PLTE", b"tRNS", b"acTL", b"fcTL", b"fdAT", b"eXIf")


def _png(draw: random.Random, whole: bytes) -> bytes:
    """Changes chunks of a PNG file, with the right checksums."""
    changed, chunks, position = whole[:8], [], 8
    while position < len(whole):
        (size,) = struct.unpack_from(">I", whole, position)
        chunks.append((whole[position + 4 : position + 8], whole[position + 8 : position + 8 + size]))
        position += 12 + size
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(chunks))
        name, data = chunks[at]
        choice = draw.random()
        if choice < 0.5:
            chunks[at] = name, mutated(draw, data)
        elif choice < 0.7:
            new = draw.choice(_CHUNKS)
            chunks.insert(at, (new, draw.choice((data, b"", bytes(40), b"x\0\0" + zlib.compress(bytes(10))))))
        elif choice < 0.71:
            chunks.insert(at, (draw.choice((b"zTXt", b"iCCP", b"IDAT")), _chunk_bomb()))
        elif choice < 0.85:
            chunks.insert(at, draw.choice(chunks))
        else:
            del chunks[at]
            chunks = chunks or [(b"IEND", b"")]
    for name, data in chunks:
        changed += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return changed


def _read_images(path: Path) -> None:
    root = path.parent.parent
    _used(datasets.images(root))
    _used(datasets.images(root, size=(6, 5), channels=1))


def _subject(
    name: str, file: str, content: Callable[[random.Random], bytes], read: Callable[[Path], object]
) -> Subject:
    return Subject(name, file, content, read, (DatasetError,), SECTION)


SUBJECTS = (
    _subject("npz", "data.npz", npz_file, lambda path: _used(datasets.npz(path), datasets.npz(path, "test"))),
    _subject("mnist images", "t10k-images-idx3-ubyte", _idx, _read_mnist),
    _subject("mnist images, gzipped", "t10k-images-idx3-ubyte.gz", _idx_gz, _read_mnist),
    _subject("mnist labels", "t10k-labels-idx1-ubyte.gz", _labels, _read_labels),
    _subject("cifar10, binary", "test_batch.bin", _records(1), _read_cifar10),
    _subject("cifar10, pickled", "test_batch", _pickled(("labels",)), _read_cifar10),
    _subject("cifar100, binary", "test.bin", _records(2), _read_cifar100),
    _subject("cifar100, pickled", "test", _pickled(("fine_labels", "coarse_labels")), _read_cifar100),
    _subject("sparsenet (MATLAB)", "IMAGES.mat", _matlab, lambda path: _used(datasets.sparsenet(path.parent))),
    _subject("housing", "housing.data", _housing, lambda path: _used(datasets.housing(path))),
    _subject("text", "book.txt", _text, lambda path: _used(datasets.text(path))),
    *(
        Subject(f"images, {form}", f"root/cats/a.{ending}", _picture(form), _read_images, (DatasetError,), "images")
        for form, ending in IMAGE_FORMATS.items()
    ),
)
