"""State dicts with the global tensors of the serial model, whatever each rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchmn.nn.slices import SlicedModule


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of the serial model: the same keys, global tensors. Every rank must call it, and gets it.

    It loads into the plain model, and with `model.load_state_dict` into a model on any other grid and mode.
    """
    state = dict(model.state_dict())
    for prefix, module in model.named_modules():
        if isinstance(module, SlicedModule):
            for name in sorted(module.cut_parameters):
                key = f"{prefix}.{name}" if prefix else name
                state[key] = module.gathered(name, state[key].detach())
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a serial model's state dict: each rank takes its part. The same as `model.load_state_dict`."""
    model.load_state_dict(state)
