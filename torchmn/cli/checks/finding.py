"""Finding: the result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the report of `torchmn doctor`."""

    level: Level
    check: str
    found: str
    advice: str = ""
    """What to do, if the level is not ok."""


def ok(check: str, found: str) -> Finding:
    """Returns the finding of a check that passed."""
    return Finding("ok", check, found)


def warn(check: str, found: str, advice: str) -> Finding:
    """Returns the finding that ranks work in part, or could be faster."""
    return Finding("warn", check, found, advice)


def fail(check: str, found: str, advice: str) -> Finding:
    """Returns the finding that ranks will not work until this is fixed."""
    return Finding("FAIL", check, found, advice)
