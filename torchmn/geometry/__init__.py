"""Halo plans: which rank owns which indices of an image, and which ones a layer's window needs from which rank.

Integers only: no torch and no communication, so that every rank computes all plans itself. Reading order: `interval`,
`window`, `dim_plan` (one dim), `halo_plan` (all dims, as one rank sees them). `torchmn.functions.halo_exchange`
executes a plan.
"""

from torchmn.geometry.dim_plan import DimPlan, Segment
from torchmn.geometry.halo_plan import BoxCopy, HaloPlan
from torchmn.geometry.interval import Interval, all_owned, owned
from torchmn.geometry.window import Window

__all__ = ["BoxCopy", "DimPlan", "HaloPlan", "Interval", "Segment", "Window", "all_owned", "owned"]
