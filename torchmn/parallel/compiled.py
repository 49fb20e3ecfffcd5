"""Modules that torch.compile took over: what they compute can not be seen, and so not be cut."""

from __future__ import annotations

from torch import nn


def compiled_modules(model: nn.Module) -> list[str]:
    """The names of what `torch.compile(module)` returned, in a model; "" for the model itself."""
    return [name for name, module in model.named_modules() if type(module).__name__ == "OptimizedModule"]
