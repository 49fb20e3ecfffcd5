"""The pass that plans fusion for a parallel model."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch import nn

from torchmn.sharded.fusion.sequential import forward_of, run_in_chains
from torchmn.sharded.fusion.wide import found_widths
from torchmn.sharded.roles import Recorder

_MOST_IMAGES = 1024  # whose widths are kept per weight


class Fusion:
    """See `ModelPass`. What it learns: by weight, how wide a run of convolutions that begins with it fetches."""

    def prepare(self, model: nn.Module) -> None:
        run_in_chains(model)

    forward_of = staticmethod(forward_of)

    def learn(self, recorder: Recorder, learned: dict[str, Any]) -> None:
        for name, widths in found_widths(recorder.notes).items():
            # What the first run found stays: evaluation may see other runs, but any width is right.
            merged = widths | learned.get(name, {})  # the new ones first: those of other images are dropped, if any
            learned[name] = dict(islice(merged.items(), _MOST_IMAGES))
