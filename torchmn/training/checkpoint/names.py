"""How a checkpoint's directory is called, and how to find it again among other files.

`<name>.step-0000000042.save-000007`: the seventh save under this name, at step 42. While it is written it has a dot in
front and `.partial` behind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERN = re.compile(r"(?P<name>.+)\.step-(?P<step>\d{10,})\.save-(?P<number>\d{6,})")
_PARTIAL = ".partial"
LONGEST = 150
"""Bytes of an escaped name: file systems allow 255 for the whole."""


@dataclass(frozen=True, order=True)
class Place:
    """One save of a checkpointer. Later saves compare greater, whatever their step."""

    number: int
    step: int

    def directory(self, name: str) -> str:
        return f"{escaped(name)}.step-{self.step:010}.save-{self.number:06}"

    def partial_directory(self, name: str) -> str:
        return f".{self.directory(name)}{_PARTIAL}"


def name_problem(name: object) -> str | None:
    """Why `name` can not name checkpoints, or None."""
    if not isinstance(name, str) or not name:
        return f"expected name to be a string that is not empty, got {name!r}"
    try:
        length = len(escaped(name).encode())
    except UnicodeEncodeError:
        return f"expected name to be valid Unicode, got {name!r}"
    if length > LONGEST:
        return f"expected a name of at most {LONGEST} bytes (as a file name), got {length}: {name!r}"
    return None


def escaped(name: str) -> str:
    """`name` as a file name: letters and digits of all scripts, spaces, dots, - and _ stay; the rest becomes %XX.

    Different names stay different. A dot in front is escaped too: the file would be hidden.
    """
    result = "".join(_escaped_character(character) for character in name)
    return "%2E" + result[1:] if result.startswith(".") else result


def _escaped_character(character: str) -> str:
    data = character.encode()  # lone surrogates are no characters: UnicodeEncodeError
    return character if character.isalnum() or character in " ._-" else "".join(f"%{byte:02X}" for byte in data)


def place_of(directory: str, name: str) -> Place | None:
    """The save that lies in `directory`, or None if that is no checkpoint called `name`."""
    match = _PATTERN.fullmatch(directory)
    if match is None or match["name"] != escaped(name):
        return None
    place = Place(int(match["number"]), int(match["step"]))
    return place if place.directory(name) == directory else None


def partial_place_of(directory: str, name: str) -> Place | None:
    """The save that was being written to `directory`, or None if that is something else."""
    if not directory.startswith(".") or not directory.endswith(_PARTIAL):
        return None
    return place_of(directory[1 : -len(_PARTIAL)], name)
