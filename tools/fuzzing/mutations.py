"""Changes of bytes, numbers, texts and JSON values that damage a file, drawn from a generator with a seed."""

from __future__ import annotations

import json
import random
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any

MANY = 1 << 30
NUMBERS = (-(2**63), -(2**31), -129, -1, 0, 1, 2, 3, 127, 255, 256, 65535, 65536, 2**24, 2**30, 2**31 - 1, 2**31,
           2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)  # fmt: skip
WORDS = (b"\0", b"\xff" * 8, b"\n", b"nan", b"inf", b"-inf", b"1e999", b"-1", b"1_0", b"9" * 5000, b"\xd9\xa1",
         b"\xed\xa0\x80", b"../../x", b"/dev/zero", b"%s%n", b"\x1f\x8b", b"PK\x03\x04", b"\x80\x04c")  # fmt: skip
_NUMBER = re.compile(rb"-?\d+")


def mutated(draw: random.Random, content: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Returns `content` after one to four changes, some of them with parts of `others`."""
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
        content = draw.choice(_CHANGES)(draw, content, others)
    return content


def _flip(draw: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8)) if content else 0):
        changed[_place(draw, content)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _truncate(draw: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    return content[: draw.choice((_place(draw, content), len(content) - 1, 0))]


def _drop(draw: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    begin = _place(draw, content)
    return content[:begin] + content[begin + _length(draw) :]


def _double(draw: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    begin = _place(draw, content)
    part = content[begin : begin + _length(draw)]
    return content[:begin] + part * draw.choice((2, 2, 3, 100)) + content[begin + len(part) :]


def _insert(draw: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    begin = _place(draw, content)
    new = draw.choice((draw.choice(WORDS), draw.randbytes(_length(draw)), bytes(draw.choice((1, 7, 4096)))))
    return content[:begin] + new + content[begin + draw.choice((0, len(new))) :]


def _integer(draw: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    """Overwrites a binary integer, most often in the first bytes, where headers are, or in the last."""
    size, order = draw.choice((1, 2, 4, 4, 8)), draw.choice(("little", "big"))
    begin = _place(draw, content)
    return (
        content[:begin]
        + (draw.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, order)  # type: ignore[arg-type]
        + content[begin + size :]
    )


def _decimal(draw: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    found = list(_NUMBER.finditer(content[:2000]))
    if not found:
        return content
    match = draw.choice(found)
    return content[: match.start()] + decimal(draw).encode() + content[match.end() :]


def _splice(draw: random.Random, content: bytes, others: Sequence[bytes]) -> bytes:
    if not others:
        return content + content
    other = draw.choice(others)
    begin, here = _place(draw, other), _place(draw, content)
    return content[:here] + other[begin : begin + draw.choice((_length(draw), MANY))] + content[here:][: _length(draw)]


_CHANGES: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip, _flip, _truncate, _drop, _double, _insert, _integer, _integer, _integer, _decimal, _splice,
)  # fmt: skip


def _place(draw: random.Random, content: bytes) -> int:
    """Returns a position: one of three in the first 64 bytes, one of three in the last 256."""
    begin, end = draw.choice(((0, 64), (0, len(content)), (len(content) - 256, len(content))))
    return draw.randrange(max(begin, 0), max(min(end, len(content)), max(begin, 0) + 1)) if content else 0


def _length(draw: random.Random) -> int:
    return draw.choice((1, 2, 4, 8, 16, 100, 1000))


def decimal(draw: random.Random) -> str:
    """Returns a number as text, many of which no file has."""
    return draw.choice(
        (str(draw.choice(NUMBERS)), str(draw.randrange(-3, 40)), repr(draw.uniform(-2, 2)), "nan", "1e999", "9" * 400)
    )


def extent(draw: random.Random) -> int:
    """Returns the extent of a dim, many of which no array has."""
    return draw.choice((draw.randrange(6), draw.choice(NUMBERS), -1, 0, 28, 784))


def packed_zeros(megabytes: int) -> tuple[bytes, int]:
    """Returns so many MB of zeros as a raw deflate stream of a thousandth of their size, and their CRC-32."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    part = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = 0
    for _ in range(megabytes):
        checksum = zlib.crc32(bytes(1 << 20), checksum)
    return part * megabytes + b"\x03\x00", checksum  # the last block is empty


def gzip_of_zeros(head: bytes, megabytes: int) -> bytes:
    """Returns a gzip file of `head` and then zeros, which takes little time to make."""
    begin = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = begin.compress(head) + begin.flush(zlib.Z_FULL_FLUSH)
    zeros, _ = packed_zeros(megabytes)
    checksum, part = zlib.crc32(head), bytes(1 << 20)
    for _ in range(megabytes):
        checksum = zlib.crc32(part, checksum)
    end = struct.pack("<II", checksum, (len(head) + (megabytes << 20)) & 0xFFFFFFFF)
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + first + zeros + end


_NESTED = {  # what `json_text` writes for these texts
    "nested lists": "[" * 90_000 + "]" * 90_000,
    "nested a little": "[" * 400 + "]" * 400,
    "nested tuples": '{"!tuple": [' * 3000 + "]}" * 3000,
    "nested objects": '{"x": ' * 900 + "1" + "}" * 900,
}


def json_text(value: Any) -> bytes:
    """Returns a value of `changed_json` as JSON, which may have more levels than Python can write."""
    text = json.dumps(value)
    for name, nested in _NESTED.items():
        text = text.replace(f'"{name}"', nested)
    return text.encode()


def changed_json(draw: random.Random, value: Any) -> Any:
    """Returns a JSON value with a change at a random place in it."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return _changed_keys(draw, value, key)
        return {**value, key: changed_json(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.85:
        index = draw.randrange(len(value))
        choice = draw.random()
        if choice < 0.2:
            return value[:index] + value[index + 1 :]
        if choice < 0.3:
            return value + [value[index]] * draw.choice((1, 40))
        return [*value[:index], changed_json(draw, value[index]), *value[index + 1 :]]
    return _other(draw, value)


def _changed_keys(draw: random.Random, value: dict[str, Any], key: str) -> dict[str, Any]:
    others = {name: item for name, item in value.items() if name != key}
    name = draw.choice(("", "x", key + "x", "!tuple", "!tensor", "-1", "99", "\ud800", draw.choice(list(value))))
    return draw.choice((others, {**others, name: value[key]}, {name: value[key], **others}))


def _other(draw: random.Random, value: Any) -> Any:
    new = (
        None, True, "", [], {}, value, [value], {"x": value}, {"!tuple": [value]}, {"!tensor": value},
        {"!numpy": {"!tensor": value}}, {"!int": "f" * 5000}, {"!float": "x"}, {"!bytes": "!"}, {"!dict": [[value]]},
        {"!size": [-1]}, {"!complex": [1]}, {"!tensor": "model/0.weight", "stride": [2**40, 1]}, "\ud800", "\0",
        *_NESTED, "float32 99999999999x99999999999 00", "../../x", float("nan"), 1e308, draw.choice(NUMBERS),
    )  # fmt: skip
    chosen = draw.choice(new)
    if isinstance(value, str) and draw.random() < 0.5:
        return mutated(draw, value.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    if type(value) is int and draw.random() < 0.5:
        return draw.choice((draw.choice(NUMBERS), value + 1, value - 1, -value, str(value), float(value)))
    return chosen
