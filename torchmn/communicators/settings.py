"""Options of a communicator, which its splits inherit."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from torchmn.communicators import wire

DEFAULT_TIMEOUT = 300.0
FUSION = os.environ.get("TORCHMN_FUSION", "1") != "0"
"""Whether models on tiles may share exchanges of halos; read once, because all ranks must do alike."""


def default_timeout() -> float:
    """Returns the seconds that a wait may last: `TORCHMN_TIMEOUT`, or 300."""
    return float(os.environ.get("TORCHMN_TIMEOUT") or DEFAULT_TIMEOUT)


def checks_by_default() -> bool:
    """Returns whether ranks compare their arguments before they communicate: yes, unless `TORCHMN_CHECKS=0`."""
    return os.environ.get("TORCHMN_CHECKS", "1") != "0"


@dataclass
class Settings:
    """Options of a communicator; `split` inherits them all."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grad_dtype: torch.dtype | None = None
    timeout: float = field(default_factory=default_timeout)
    checks: bool = field(default_factory=checks_by_default)
    max_message_bytes: int = wire.DEFAULT_MAX_MESSAGE_BYTES

    def switches(self) -> dict[str, bool]:
        """Returns what must be switched alike on all ranks, by environment variable."""
        return {"TORCHMN_CHECKS": self.checks, "TORCHMN_FUSION": FUSION}
