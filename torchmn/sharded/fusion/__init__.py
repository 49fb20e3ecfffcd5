"""Fusion: convolutions that share an exchange of halos, and compute while it travels. Faster, and the same numbers.

An optional layer: loaded by name (passes.py), imported by nobody, switched off by `TORCHMN_FUSION=0` on all ranks.

wide.py             tiles that remember what lies around them: one exchange for a run of convolutions
wide_convolution.py around the rule of convolutions: on wide tiles, or while the halo travels
pointwise.py        around the rules of functions of single elements, which keep what lies around the tile
sequential.py       runs of convolutions inside an nn.Sequential, computed in one go
chain.py, blocks.py what computes them
borders.py, border_products.py  a convolution whose halo travels while the tile is computed
"""

from __future__ import annotations

from torchmn.sharded.fusion import (
    pointwise,  # noqa: F401  (importing them puts them around rules)
    wide_convolution,  # noqa: F401  (importing them puts them around rules)
)
from torchmn.sharded.fusion.fusion import Fusion

__all__ = ["Fusion"]
