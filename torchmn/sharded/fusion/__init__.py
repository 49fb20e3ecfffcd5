"""Fusion: consecutive convolutions share one halo exchange, and compute while halos are on the way, with equal results.

An optional pass: `parallel/passes.py` loads it by name, no other file imports it, and `TORCHMN_FUSION=0`, set on all
ranks, switches it off.

fusion_pass.py       Fusion, the pass
wide_halo.py         tiles with a wide halo: one exchange for a run of convolutions
wide_convolution.py  wrapper around the rule of convolutions: on wide tiles, or overlapped with the exchange
wide_pointwise.py    wrappers around the rules of elementwise functions, which keep the wide halo
conv_fusion.py       runs of convolutions inside an nn.Sequential, computed as one chain
conv_chain.py        the autograd function of a chain
onednn_blocks.py     values of a chain that stay in the blocked memory format of oneDNN
halo_convolution.py  a convolution that computes the tile while its halo is on the way
halo_reach.py        which outputs and taps a received halo contributes to
"""

from __future__ import annotations

from torchmn.sharded.fusion import (
    wide_convolution,  # noqa: F401  (importing it wraps rules)
    wide_pointwise,  # noqa: F401  (importing it wraps rules)
)
from torchmn.sharded.fusion.fusion_pass import Fusion

__all__ = ["Fusion"]
