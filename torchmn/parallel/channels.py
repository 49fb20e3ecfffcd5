"""Modelpar for layers without vectors: convolutions cut by output channels, embeddings by columns."""

from __future__ import annotations

from torch import nn

from torchmn.communicators.process_grid import ProcessGrid


def swap_channel_layers(model: nn.Module, grid: ProcessGrid) -> None:
    """Put this rank's slices in the place of convolutions and embeddings."""
