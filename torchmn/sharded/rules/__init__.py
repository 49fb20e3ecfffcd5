"""What each torch function means for parts of tensors: one family of functions, one file.

A rule computes this rank's part of the result such that all parts together are the serial result. A function
without a rule is refused by name where an image is cut; where only a vector is, it gets the whole vector.
"""

from __future__ import annotations

from torchmn.sharded.rules import (  # noqa: F401
    adaptive,
    convolution,
    dropout,
    indexing,
    joining,
    metadata,
    normalization,
    otherwise,
    padding,
    pointwise,
    pooling,
    reductions,
    reshaping,
    softmax,
    upsampling,
    vectors,
)
