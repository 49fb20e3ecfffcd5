"""Modelpar for layers without vectors: convolutions cut by output channels, embeddings by columns or rows."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchmn._torch_compat import forward_pre_hooks
from torchmn.communicators.process_grid import ProcessGrid
from torchmn.nn.channel_layers import ChannelConv1d, ChannelConv2d, ChannelConv3d, VectorEmbedding
from torchmn.parallel.replacing import LayersOfTheirOwn, replace_module

_CONVOLUTIONS = {nn.Conv1d: ChannelConv1d, nn.Conv2d: ChannelConv2d, nn.Conv3d: ChannelConv3d}


def swap_channel_layers(model: nn.Module, grid: ProcessGrid) -> None:
    """Put this rank's slices in the place of convolutions and embeddings.

    A layer that shares its parameters stays whole on every rank, and so does one with fewer channels than ranks, or
    with a hook that may compute its weight from the whole of it, as torch.nn.utils.spectral_norm's does.
    """
    own = LayersOfTheirOwn(model)
    for name, module in list(model.named_modules()):
        if not name or forward_pre_hooks(module) or module not in own:
            continue
        if type(module) in _CONVOLUTIONS:
            if _units(module) >= grid.tiles.size:
                replace_module(model, name, _CONVOLUTIONS[type(module)].of(module, grid))
        elif isinstance(module, nn.Embedding) and _can_be_cut(module, grid.tiles.size):
            replace_module(model, name, VectorEmbedding.of(module, grid))


def _units(convolution: Any) -> int:
    """How many pieces of a convolution's outputs can be on different ranks: groups stay together."""
    return convolution.groups if convolution.groups > 1 else convolution.out_channels


def _can_be_cut(layer: nn.Embedding, ranks: int) -> bool:
    plain = type(layer) is nn.Embedding and layer.max_norm is None  # max_norm looks at whole rows
    by_columns = layer.embedding_dim >= ranks
    # By rows, each rank looks up other ids than were asked for, and would count those.
    return plain and (by_columns or (layer.num_embeddings >= ranks and not layer.scale_grad_by_freq))
