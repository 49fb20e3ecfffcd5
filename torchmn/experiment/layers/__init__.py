"""The layers that an experiment file can name; importing this registers them."""

from torchmn.experiment.layers import (
    boltzmann,
    brain,
    composite,
    convolution,
    dropout,
    linear,
    normalization,
    own_module,
    pooling,
    recurrent,
    shaping,
)

__all__ = [
    "boltzmann", "brain", "composite", "convolution", "dropout", "linear", "normalization", "own_module", "pooling",
    "recurrent", "shaping",
]  # fmt: skip
