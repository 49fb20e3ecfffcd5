"""Checks of arguments of image layers: sizes given as one integer or as (height, width), and counts."""

from __future__ import annotations

from torchmn.errors import ArgumentError

Size = int | tuple[int, int]


def pair(layer: str, name: str, value: object, least: int = 1) -> tuple[int, int]:
    """Returns (height, width) from `value`, an int for both or a pair of ints.

    Args:
        layer: its name, for errors.
        name: of the argument, for errors.
        value: the argument.
        least: the smallest value allowed.

    Raises:
        ArgumentError: if `value` is something else, or too small.
    """
    both = tuple(value) if isinstance(value, tuple | list) else (value, value)
    extents = [extent for extent in both if isinstance(extent, int) and not isinstance(extent, bool)]
    if len(both) != 2 or len(extents) != 2:
        raise ArgumentError(f"{layer}: expected {name} to be an integer or a pair (height, width), got {value!r}")
    if min(extents) < least:
        raise ArgumentError(f"{layer}: expected {name} to be at least {least}, got {value!r}")
    return extents[0], extents[1]


def count(layer: str, name: str, value: object) -> int:
    """Returns `value`, an integer of at least 1; raises an ArgumentError otherwise. Arguments as for `pair`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{layer}: expected {name} to be a whole number of at least 1, got {value!r}")
    return value


def odd_pair(layer: str, name: str, value: object) -> tuple[int, int]:
    """Returns `pair` of odd numbers, for a window with a centre; raises an ArgumentError otherwise."""
    both = pair(layer, name, value)
    if not all(extent % 2 for extent in both):
        raise ArgumentError(
            f"{layer}: expected {name} to be odd, so that its window has a middle, got {value!r}. "
            f"Use {tuple(extent | 1 for extent in both)}."
        )
    return both
