"""Tables of the names of other libraries, as pages of the documentation show them."""

from __future__ import annotations

from collections.abc import Iterable

from torchmn.other_spellings import OtherName


def what(entry: OtherName) -> str:
    """What a name is here: the same name, another one, or nothing."""
    if not entry.here:
        return "an error with advice"
    own = entry.name.replace("CommunicatorBase", "Communicator")
    return "the same" if entry.here == own else f"`torchmn.{entry.here}`"


def markdown(library: str, names: Iterable[OtherName]) -> str:
    """The table of a page, one row per name."""
    lines = [f"| {library} | here | note |", "|---|---|---|"]
    lines += [f"| `{entry.name}` | {what(entry)} | {entry.note} |" for entry in names]
    return "\n".join(lines) + "\n"
