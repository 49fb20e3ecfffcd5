"""The layers that an experiment file can name; importing this registers them."""

from torchmn.experiment.vocabulary.layers import (  # noqa: F401
    boltzmann,
    composite,
    convolution,
    dropout,
    linear,
    local_filters,
    normalization,
    own_module,
    pooling,
    recurrent,
    shaping,
)
