"""Layers that normalise."""

from __future__ import annotations

from torch import nn

from torchmn.experiment.file.fields import Positive, Share
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, batch_norm_for


@register_layer("batch_norm")
class BatchNorm(Layer):
    """Mean 0 and variance 1 over the batch of all ranks, for each map or unit."""

    eps: Positive = 1e-5
    momentum: Share = 0.1

    def build(self, shape: Shape) -> nn.Module:
        return batch_norm_for(shape, eps=self.eps, momentum=self.momentum)


@register_layer("layer_norm")
class LayerNorm(Layer):
    """Mean 0 and variance 1 over each sample."""

    eps: Positive = 1e-5

    def build(self, shape: Shape) -> nn.Module:
        return nn.LayerNorm(list(shape), self.eps)
