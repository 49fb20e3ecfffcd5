"""Passes: optional layers that let a parallel model compute faster, and the same numbers. The core works without."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from torch import nn

import torchmn.sharded.rules  # noqa: F401  (what a pass registers lies around them)
from torchmn.optional import FUSION, optional_module
from torchmn.sharded.roles import Recorder


class ModelPass(Protocol):
    """What a pass does for a model on tiles."""

    def prepare(self, model: nn.Module) -> None:
        """Called once per model, before its first forward."""

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """Returns the forward to be called with the model and its inputs: that of its class, or a faster one."""
        ...

    def learn(self, recorder: Recorder, learned: dict[str, Any]) -> None:
        """Called after each dry run. Puts into `learned`, by names of parameters, what `Sharding.learned` then has."""


class NoPass:
    """Leaves models as they are."""

    def prepare(self, model: nn.Module) -> None:
        pass

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        return type(model).forward

    def learn(self, recorder: Recorder, learned: dict[str, Any]) -> None:
        pass


@cache
def model_pass() -> ModelPass:
    """Returns the pass of this process: fusion, unless `TORCHMN_FUSION=0`, or its package was taken away."""
    fusion = optional_module("torchmn.sharded.fusion") if FUSION else None
    return NoPass() if fusion is None else fusion.Fusion()
