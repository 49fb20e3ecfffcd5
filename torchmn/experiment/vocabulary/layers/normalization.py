"""Batch and layer normalisation."""

from __future__ import annotations

from torch import nn

from torchmn.experiment.file.fields import Fraction, Positive
from torchmn.experiment.file.registry import Layer, register_layer
from torchmn.experiment.vocabulary.layers.options import Shape, batch_norm_for


@register_layer("batch_norm")
class BatchNorm(Layer):
    """Batch normalisation of each map or unit, with statistics over the global batch."""

    eps: Positive = 1e-5
    momentum: Fraction = 0.1

    def build(self, shape: Shape) -> nn.Module:
        return batch_norm_for(shape, eps=self.eps, momentum=self.momentum)


@register_layer("layer_norm")
class LayerNorm(Layer):
    """Layer normalisation over all dims of a sample."""

    eps: Positive = 1e-5

    def build(self, shape: Shape) -> nn.Module:
        return nn.LayerNorm(list(shape), self.eps)
