"""Dropout whose masks follow from seed, step and layer: at any number of ranks, and after a resume, the serial ones."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout


@dataclass
class Step:
    """Which step of the training this is, and which rows of its batch this rank has. The trainer sets it."""

    seed: int = 0
    number: int = 0
    first: int = 0
    total: int = 0


class Dropout(nn.Module):
    """nn.Dropout that draws the mask of the whole batch and takes this rank's rows of it."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.place = 0
        self.step: Step | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, ...), this rank's part of the batch."""
        if not self.training or self.rate == 0:
            return x
        if self.step is None:
            return dropout(x, self.rate, training=True)
        text = f"{self.step.seed}/{self.place}/{self.step.number}"
        seed = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
        # float32 whatever x is, so that a run in float64 drops the same values.
        drawn = torch.rand(self.step.total, *x.shape[1:], generator=torch.Generator().manual_seed(seed))
        mine = drawn[self.step.first : self.step.first + x.shape[0]].to(x.device)
        return x * (mine >= self.rate).to(x.dtype) / (1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def attach(model: nn.Module, step: Step) -> None:
    """Let every dropout of `model` draw from `step`; torch's own ones are replaced by ours."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p).train(child.training))
    for place, module in enumerate(m for m in model.modules() if isinstance(m, Dropout)):
        module.place, module.step = place, step
