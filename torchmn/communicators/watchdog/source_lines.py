"""Finds the line of the user's code that is running, for error messages and for the watchdog's report.

Recording an `Instruction` (a code object and an offset in it) is cheap enough for every message; `describe_line` turns
it into `file:line in function` when it is needed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType

_LIBRARIES = ("torchmn.", "torch.", "mpi4py.", "threading", "importlib.", "runpy", "concurrent.")

Instruction = tuple[CodeType, int]
"""A code object and the offset of an instruction in it."""


def line_of_thread(thread: int) -> str:
    """Returns `file:line in function` of the user's code that the thread is in, or "" if it has ended."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else describe_line(*_innermost_user_instruction(frame))


def user_line() -> str:
    """Returns `file:line in function` of the user's code that is running."""
    return describe_line(*user_instruction(depth=2))


def user_instruction(depth: int = 1) -> Instruction:
    """Returns the instruction of the user's code that is running.

    Args:
        depth: number of frames, from this function outwards, that are known to belong to this package.
    """
    frame = sys._getframe(depth)
    if is_library_module(frame.f_globals.get("__name__", "")):
        return _innermost_user_instruction(frame)
    return frame.f_code, frame.f_lasti


def running_frames() -> Iterator[FrameType]:
    """Yields the frames of this thread, from the caller outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _innermost_user_instruction(frame: FrameType) -> Instruction:
    """Returns that of the first frame, from `frame` outwards, of a user's module; of `frame` if there is none."""
    outer: FrameType | None = frame
    while outer is not None:
        if not is_library_module(outer.f_globals.get("__name__", "")):
            return outer.f_code, outer.f_lasti
        outer = outer.f_back
    return frame.f_code, frame.f_lasti


@lru_cache(maxsize=4096)
def is_library_module(name: str) -> bool:
    """Returns whether a module belongs to this package, torch, mpi4py or Python's start-up, and not to the user."""
    return f"{name}.".startswith(_LIBRARIES)


def describe_line(code: CodeType, instruction: int) -> str:
    """Returns `file:line in function` of the instruction at that offset."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    line = next(lines, None) or code.co_firstlineno
    try:
        name = os.path.relpath(code.co_filename) if os.path.isabs(code.co_filename) else code.co_filename
    except OSError:  # the working directory was removed, and other ranks may wait for this report
        name = code.co_filename
    shown = code.co_filename if name.startswith("..") else name
    return f"{shown}:{line} in {code.co_name}"
