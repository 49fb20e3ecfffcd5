"""Layers for images, and layers that compute over several ranks.

layers/         multi-node batch normalisation and recurrent networks; slices of layers for tensor parallel models;
                HaloLayer, the base class of users' layers on tiles
local_filters/  layers of the sparse autoencoder: filters without shared weights, L2 pooling, contrast normalisation
"""

from typing import TYPE_CHECKING

from torchmn.nn.layers.batch_norm import MultiNodeBatchNorm1d, MultiNodeBatchNorm2d, MultiNodeBatchNorm3d
from torchmn.nn.layers.channel_layers import ChannelConv1d, ChannelConv2d, ChannelConv3d, VectorEmbedding
from torchmn.nn.layers.halo_layer import HaloLayer
from torchmn.nn.layers.mnbn_model import create_mnbn_model
from torchmn.nn.layers.n_step_rnn import MultiNodeNStepRNN, create_multi_node_n_step_rnn
from torchmn.nn.layers.sliced_module import SlicedModule as SlicedModule
from torchmn.nn.layers.vector_linear import VectorLinear
from torchmn.nn.local_filters.contrast_norm import LocalContrastNorm2d
from torchmn.nn.local_filters.cross_map import CrossMapPool, CrossMapResponseNorm
from torchmn.nn.local_filters.l2_pool import L2Pool2d
from torchmn.nn.local_filters.local_filter import LocalFilter2d
from torchmn.other_spellings import module_attribute

__all__ = [
    "ChannelConv1d",
    "ChannelConv2d",
    "ChannelConv3d",
    "CrossMapPool",
    "CrossMapResponseNorm",
    "HaloLayer",
    "L2Pool2d",
    "LocalContrastNorm2d",
    "LocalFilter2d",
    "MultiNodeBatchNorm1d",
    "MultiNodeBatchNorm2d",
    "MultiNodeBatchNorm3d",
    "MultiNodeNStepRNN",
    "VectorEmbedding",
    "VectorLinear",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
]


if not TYPE_CHECKING:  # type checkers would accept every name

    def __getattr__(name: str) -> object:
        return module_attribute("nn", name, () if name.startswith("_") else (name,))
