"""What a communicator was told at its creation, and hands on to its splits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torchmn.communicators import checks, watchdog, wire


@dataclass
class Settings:
    """Options of a communicator; `split` inherits them all."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    grad_dtype: torch.dtype | None = None
    timeout: float = field(default_factory=watchdog.default_timeout)
    checks: bool = field(default_factory=checks.enabled_by_default)
    max_message_bytes: int = wire.DEFAULT_MAX_MESSAGE_BYTES
