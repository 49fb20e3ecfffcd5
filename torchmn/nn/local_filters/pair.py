"""Sizes along height and width, as layers of images take them: one integer for both, or two."""

from __future__ import annotations

from torchmn.errors import ArgumentError

Size = int | tuple[int, int]


def pair(layer: str, name: str, value: object, least: int = 1) -> tuple[int, int]:
    """(height, width) from `value`, an int for both or a pair of ints; one below `least` is an ArgumentError."""
    both = tuple(value) if isinstance(value, tuple | list) else (value, value)
    extents = [extent for extent in both if isinstance(extent, int) and not isinstance(extent, bool)]
    if len(both) != 2 or len(extents) != 2:
        raise ArgumentError(f"{layer}: expected {name} to be an integer or a pair (height, width), got {value!r}")
    if min(extents) < least:
        raise ArgumentError(f"{layer}: expected {name} to be at least {least}, got {value!r}")
    return extents[0], extents[1]


def count(layer: str, name: str, value: object) -> int:
    """`value`, a whole number of at least 1; anything else is an ArgumentError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{layer}: expected {name} to be a whole number of at least 1, got {value!r}")
    return value


def odd_pair(layer: str, name: str, value: object) -> tuple[int, int]:
    """`pair` for a window with a middle: an even extent is an ArgumentError."""
    both = pair(layer, name, value)
    if not all(extent % 2 for extent in both):
        raise ArgumentError(
            f"{layer}: expected {name} to be odd, so that its window has a middle, got {value!r}. "
            f"Use {tuple(extent | 1 for extent in both)}."
        )
    return both
