"""The layers that an experiment file can use. Importing this package registers them."""

from torchmn.experiment.vocabulary.layers import (  # noqa: F401
    boltzmann,
    composite,
    convolution,
    dropout,
    linear,
    local_filters,
    normalization,
    pooling,
    recurrent,
    shaping,
    user_module,
)
