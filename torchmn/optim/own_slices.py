"""Parameters of which a rank holds a slice of its own: the optimizer asks, and loads nothing of `torchmn.nn` for it."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

_ROLES = "torchmn.nn.parts.roles"


def replicas_of(parameter: Tensor) -> Any:
    """The communicator over which the gradient of a rank's own slice is averaged; None for other parameters."""
    # Slices are marked there, so as long as nobody has loaded it there are none. It comes with all layers: 1.5 MB.
    asked = getattr(sys.modules.get(_ROLES), "replicas_of", None)
    return None if asked is None else asked(parameter)
