"""Layers that compute one rank's part of a layer over all ranks."""

from torchmn.nn.batch_norm import MultiNodeBatchNorm1d, MultiNodeBatchNorm2d, MultiNodeBatchNorm3d
from torchmn.nn.mnbn_model import create_mnbn_model

__all__ = ["MultiNodeBatchNorm1d", "MultiNodeBatchNorm2d", "MultiNodeBatchNorm3d", "create_mnbn_model"]
