"""ChainerMN's `global_except_hook`: here a rank that raises always ends the job, unless `TORCHMN_ABORT=0`."""

from __future__ import annotations

import os
import warnings

__all__ = ["add_hook"]


def add_hook() -> None:
    """Does nothing, because the hook is always there; warns if `TORCHMN_ABORT=0` switched it off."""
    if os.environ.get("TORCHMN_ABORT") == "0":
        warnings.warn("global_except_hook.add_hook: TORCHMN_ABORT=0 switches the hook off: unset it", stacklevel=2)
