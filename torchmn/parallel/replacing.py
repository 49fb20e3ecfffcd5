"""Putting one module in the place of another."""

from __future__ import annotations

from torch import nn

# In eval mode these hand the weights of their Linears to one fused kernel, which takes whole ones only.
_READ_WEIGHTS_OF_CHILDREN = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule called `name`."""
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent).register_module(last, module)


def has_parameters_of_its_own(model: nn.Module, layer: nn.Module) -> bool:
    """Whether `layer` stands in one place, is no other module's business, and shares no parameter with another."""
    places = [m for _, m in model.named_modules(remove_duplicate=False) if m is layer]
    mine = {id(p) for p in layer.parameters(recurse=False)}
    others = {id(p) for m in model.modules() if m is not layer for p in m.parameters(recurse=False)}
    readers = (m for m in model.modules() if isinstance(m, _READ_WEIGHTS_OF_CHILDREN))
    read = any(child is layer for reader in readers for child in reader.modules())
    return len(places) == 1 and bool(mine) and not mine & others and not read
