"""Replaces layers of a model by this rank's slices of them: convolutions, embeddings, and Linear layers.

How a Linear is sliced depends on the layers around it, which `LinearRecorder` records in a dry run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchmn._torch_compat import forward_pre_hooks
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.nn.layers.channel_layers import ChannelConv1d, ChannelConv2d, ChannelConv3d, VectorEmbedding
from torchmn.nn.layers.vector_linear import VectorLinear
from torchmn.sharded.registry import functions_named
from torchmn.sharded.rules import pointwise
from torchmn.sharded.sharding import Cut, FlatCut
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of

# In evaluation mode these pass the weights of their Linears to one fused kernel, which needs whole weights.
_READ_WEIGHTS_OF_CHILDREN = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replaces the submodule called `name` by `module`."""
    parent, _, last = name.rpartition(".")
    model.get_submodule(parent).register_module(last, module)


class UnsharedLayers:
    """The set of modules that may be replaced: registered once, with parameters that no other module reads.

    Searches the model once. Modules that are added later are not in the set.
    """

    def __init__(self, model: nn.Module):
        self._modules = modules = list(model.modules())  # references, so that ids are not reused
        self._places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
        self._holders = Counter(id(p) for m in modules for p in m.parameters(recurse=False))
        readers = [m for m in modules if isinstance(m, _READ_WEIGHTS_OF_CHILDREN)]
        self._read = {id(child) for reader in readers for child in reader.modules()}

    def __contains__(self, layer: nn.Module) -> bool:
        parameters = [id(p) for p in layer.parameters(recurse=False)]
        alone = self._places[id(layer)] == 1 and id(layer) not in self._read
        return alone and bool(parameters) and all(self._holders[p] == 1 for p in parameters)


_CONVOLUTIONS = {nn.Conv1d: ChannelConv1d, nn.Conv2d: ChannelConv2d, nn.Conv3d: ChannelConv3d}


def swap_channel_layers(model: nn.Module, grid: ProcessGrid) -> None:
    """Replaces convolutions and embeddings by this rank's slices of them.

    Layers stay replicated if they share parameters, have fewer channels than ranks, or have a hook that may compute the
    weight, such as that of torch.nn.utils.spectral_norm.
    """
    unshared = UnsharedLayers(model)
    for name, module in list(model.named_modules()):
        if not name or forward_pre_hooks(module) or module not in unshared:
            continue
        if type(module) in _CONVOLUTIONS:
            if _units(module) >= grid.tiles.size:
                replace_module(model, name, _CONVOLUTIONS[type(module)].of(module, grid))
        elif isinstance(module, nn.Embedding) and _can_be_cut(module, grid.tiles.size):
            replace_module(model, name, VectorEmbedding.of(module, grid))


def _units(convolution: Any) -> int:
    """Returns into how many pieces the outputs of a convolution can be cut: groups are not divided."""
    return convolution.groups if convolution.groups > 1 else convolution.out_channels


def _can_be_cut(layer: nn.Embedding, ranks: int) -> bool:
    plain = type(layer) is nn.Embedding and layer.max_norm is None  # max_norm needs whole rows
    by_columns = layer.embedding_dim >= ranks
    # By rows, each rank looks up a substitute for the ids of other ranks, which scale_grad_by_freq would count.
    return plain and (by_columns or (layer.num_embeddings >= ranks and not layer.scale_grad_by_freq))


_ELEMENTWISE = {
    function
    for name in (*pointwise.ACTIVATIONS, *pointwise.ARITHMETIC, "dropout")
    for variant in (name, f"{name}_")
    for function in functions_named(variant)
}


@dataclass
class LinearUse:
    """The use of a Linear layer in a dry run.

    Attributes:
        layer: the layer.
        calls: how often it was called.
        cut: of its input.
        source: the Linear from whose output the input is computed by elementwise functions.
        feeds: the Linears whose source this is.
        used_elsewhere: whether the output is also used by other functions.
        per_pixel: whether the input is a cut image; then every rank needs the whole layer.
    """

    layer: nn.Linear
    calls: int = 0
    cut: Cut | FlatCut | None = None
    source: LinearUse | None = None
    feeds: list[LinearUse] = field(default_factory=list)
    used_elsewhere: bool = False
    per_pixel: bool = False


class LinearRecorder(TorchFunctionMode):
    """Records the uses of Linear layers while a model runs.

    Args:
        weights: id of a weight -> the use of its layer.

    Attributes:
        order: the uses, in the order of calls.
    """

    def __init__(self, weights: dict[int, LinearUse]):
        super().__init__()
        self._weights = weights
        self._made_by: dict[int, tuple[Tensor, LinearUse]] = {}  # with the tensors, so that ids are not reused
        self.order: list[LinearUse] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = leaves_of(Tensor, (args, kwargs or {}))
        if getattr(func, "__name__", "") in ("__get__", "size", "dim"):
            return result
        sources = [self._made_by[id(x)][1] for x in tensors if id(x) in self._made_by]
        use = self._weights.get(id(tensors[1])) if func is F.linear and len(tensors) > 1 else None
        if use is not None:
            self._record(use, tensors[0], sources)
            self._made_by[id(result)] = (result, use)
        elif len(sources) == 1 and func in _ELEMENTWISE and len(tensors) == 1 and isinstance(result, Tensor):
            self._made_by[id(result)] = (result, sources[0])
        else:
            for source in sources:
                source.used_elsewhere = True
        return result

    def _record(self, use: LinearUse, x: Tensor, sources: Sequence[LinearUse]) -> None:
        use.calls += 1
        self.order.append(use)
        if isinstance(x, ShardedTensor):
            use.cut = x.spec.cuts[-1]
            use.per_pixel = use.cut is None and x.spec.is_tile
        elif sources:
            use.source = sources[0]
            sources[0].feeds.append(use)


def choose_splits(order: Sequence[LinearUse]) -> list[tuple[LinearUse, str]]:
    """Returns for each Linear whether its weight is sliced by "input" or by "output".

    A Linear that feeds only others is sliced by output and these by input, so that no communication is needed between
    them.
    """
    chosen: dict[int, str] = {}
    for use in order:
        if use.cut is not None or (use.source is not None and chosen.get(id(use.source)) == "output"):
            chosen[id(use)] = "input"
        elif use.feeds and not use.used_elsewhere and all(other.calls == 1 for other in use.feeds):
            chosen[id(use)] = "output"
        else:
            chosen[id(use)] = "input"
    return [(use, chosen[id(use)]) for use in order]


def swap_linears(model: nn.Module, grid: ProcessGrid, splits: Sequence[tuple[LinearUse, str]]) -> None:
    """Replaces the Linear layers that are called once by this rank's slices of them."""
    places = {id(module): name for name, module in model.named_modules(remove_duplicate=True)}
    for use, split in splits:
        if use.calls != 1 or use.per_pixel:
            continue
        if use.layer.in_features < grid.tiles.size and split == "input" and use.cut is None:
            continue  # some ranks would have an empty slice
        name = places[id(use.layer)]
        if not name:
            continue  # the model is this layer, which cannot replace itself: it stays whole
        columns = use.cut if isinstance(use.cut, FlatCut) else None
        replace_module(model, name, VectorLinear.of(use.layer, grid, split, columns))
