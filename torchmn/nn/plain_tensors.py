"""A block in which torch functions are only themselves."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def plain_tensors() -> AbstractContextManager[None]:
    """While it lasts, no torch function is watched: for a layer that computes its own rank's part from plain tensors.

    The forward of a parallel model watches every call for dropout and batch statistics. That costs a few microseconds
    each, and an exchange with a neighbour makes dozens of calls.
    """
    return torch._C.DisableTorchFunction()  # type: ignore[attr-defined]
