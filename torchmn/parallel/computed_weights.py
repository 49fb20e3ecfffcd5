"""Weights that torch computes before every forward and keeps as attributes: of pruned layers, the old weight_norm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

_one_at_a_time = threading.Lock()  # ranks that are threads copy one model


@contextmanager
def computed_weights_detached(model: nn.Module) -> Iterator[None]:
    """While it lasts the model can be copied: torch copies no result of a computation, and these are computed anew."""
    with _one_at_a_time:
        yield from _detached(model)


def _detached(model: nn.Module) -> Iterator[None]:
    found = [
        (vars(module), name, value)
        for module in model.modules()
        if any(type(hook).__module__.startswith("torch.nn.utils") for hook in module._forward_pre_hooks.values())
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]
    for held, name, value in found:
        held[name] = value.detach()
    try:
        yield
    finally:
        for held, name, value in found:
            held[name] = value
