"""The rules by which torch functions compute with sharded tensors, one file per family of functions.

A rule computes this rank's shard of the result, such that all shards together are the result on one rank. fallback.py
handles functions without a rule.
"""

from __future__ import annotations

from torchmn.sharded.rules import (  # noqa: F401
    adaptive,
    convolution,
    dropout,
    fallback,
    indexing,
    joining,
    metadata,
    normalization,
    padding,
    pointwise,
    pooling,
    reductions,
    reshaping,
    softmax,
    upsampling,
    vectors,
)
