"""Fusion: the pass that prepares fusion for a parallel model."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch import nn

from torchmn.sharded.fusion.conv_fusion import forward_of, fuse_sequentials
from torchmn.sharded.fusion.wide_halo import found_widths
from torchmn.sharded.parameter_use import Recorder

_MOST_IMAGES = 1024  # image shapes per weight whose widths are kept


class Fusion:
    """A `ModelPass`. It learns, per weight, how wide a halo the run of convolutions that begins with it fetches."""

    def prepare(self, model: nn.Module) -> None:
        fuse_sequentials(model)

    forward_of = staticmethod(forward_of)

    def learn(self, recorder: Recorder, learned: dict[str, Any]) -> None:
        for name, widths in found_widths(recorder.notes).items():
            # The first width found for an image is kept: in evaluation there may be other runs, but any width is right.
            merged = widths | learned.get(name, {})  # new images first: if there are too many, old ones are dropped
            learned[name] = dict(islice(merged.items(), _MOST_IMAGES))
