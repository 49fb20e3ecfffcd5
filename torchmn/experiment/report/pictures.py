"""Images as PNG files inside the page."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np


def png(pixels: np.ndarray) -> bytes:
    """A PNG of bytes (height, width) or (height, width, 3)."""
    height, width = pixels.shape[:2]
    colour = 0 if pixels.ndim == 2 else 2
    rows = np.ascontiguousarray(pixels, dtype=np.uint8).reshape(height, -1)
    lines = b"".join(b"\0" + row.tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def data_uri(image: np.ndarray) -> str:
    """A picture of an image (maps, height, width) with values of any range: grey, or colours where it has 3 maps."""
    low, high = float(image.min()), float(image.max())
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    scaled = ((image - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    pixels = scaled.transpose(1, 2, 0) if len(scaled) == 3 else scaled[0]
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()
