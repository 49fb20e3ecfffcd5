"""Who owns which part of an image, and what a window needs from whom: integers only, no torch, no ranks to ask."""

from torchmn.geometry.dim_plan import DimPlan, Segment
from torchmn.geometry.halo_plan import BoxCopy, HaloPlan
from torchmn.geometry.interval import Interval, all_owned, owned
from torchmn.geometry.window import Window

__all__ = ["BoxCopy", "DimPlan", "HaloPlan", "Interval", "Segment", "Window", "all_owned", "owned"]
