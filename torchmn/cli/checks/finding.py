"""What a rung of the ladder found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report. `advice` says what to do where the level is not ok."""

    level: Level
    rung: str
    found: str
    advice: str = ""


def ok(rung: str, found: str) -> Finding:
    """All is well."""
    return Finding("ok", rung, found)


def warn(rung: str, found: str, advice: str) -> Finding:
    """It works, but not as well as it could, or only in part."""
    return Finding("warn", rung, found, advice)


def fail(rung: str, found: str, advice: str) -> Finding:
    """Ranks will not work before this is mended."""
    return Finding("FAIL", rung, found, advice)
