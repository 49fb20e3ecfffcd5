"""Layers of images, and layers that compute one rank's part of a layer over all ranks."""

from torchmn.nn.batch_norm import MultiNodeBatchNorm1d, MultiNodeBatchNorm2d, MultiNodeBatchNorm3d
from torchmn.nn.channel_layers import ChannelConv1d, ChannelConv2d, ChannelConv3d, VectorEmbedding
from torchmn.nn.contrast_norm import LocalContrastNorm2d
from torchmn.nn.cross_map import CrossMapPool, CrossMapResponseNorm
from torchmn.nn.halo_layer import HaloLayer
from torchmn.nn.l2_pool import L2Pool2d
from torchmn.nn.local_filter import LocalFilter2d
from torchmn.nn.mnbn_model import create_mnbn_model
from torchmn.nn.n_step_rnn import MultiNodeNStepRNN, create_multi_node_n_step_rnn
from torchmn.nn.vector_linear import VectorLinear

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
