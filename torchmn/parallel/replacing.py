"""Putting one module in the place of another."""

from __future__ import annotations

from collections import Counter

from torch import nn

# In eval mode these hand the weights of their Linears to one fused kernel, which takes whole ones only.
_READ_WEIGHTS_OF_CHILDREN = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule called `name`."""
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent).register_module(last, module)


class LayersOfTheirOwn:
    """The modules that stand in one place, are no other module's business, and share no parameter with another.

    One pass over `model` for all of its layers; they must be those that it had then.
    """

    def __init__(self, model: nn.Module):
        self._modules = modules = list(model.modules())  # kept, so that ids stay theirs
        self._places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
        self._holders = Counter(id(p) for m in modules for p in m.parameters(recurse=False))
        readers = [m for m in modules if isinstance(m, _READ_WEIGHTS_OF_CHILDREN)]
        self._read = {id(child) for reader in readers for child in reader.modules()}

    def __contains__(self, layer: nn.Module) -> bool:
        mine = [id(p) for p in layer.parameters(recurse=False)]
        alone = self._places[id(layer)] == 1 and id(layer) not in self._read
        return alone and bool(mine) and all(self._holders[p] == 1 for p in mine)
