"""Guard: images inside objects that are not searched for tensors."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from torchmn.parallel.events import ForwardEvent, guard
from torchmn.trees import leaves


@guard(on="forward", why="the model would compute with one rank's tile as if it were the whole image")
def images_in_objects(seen: ForwardEvent) -> str | None:
    """Returns an error for NumPy arrays, and for tensors that are attributes of an argument."""
    if not seen.parallelism.cuts_images:
        return None
    for x in leaves((seen.args, seen.kwargs)):
        if isinstance(x, Tensor):
            continue
        attributes = getattr(x, "__dict__", {}).values()
        if isinstance(x, np.ndarray) or any(isinstance(value, Tensor | np.ndarray) for value in attributes):
            return (
                "forward of a parallel model: expected images as tensors, alone or in tuples, lists and dicts, got "
                f"{type(x).__name__}, in which they cannot be found and cut"
            )
    return None
