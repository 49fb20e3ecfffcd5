"""ModelPass: the interface of an optional pass that makes a parallel model faster, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

from torch import nn

import torchmn.sharded.rules  # noqa: F401  (a pass wraps rules, so they must be registered first)
from torchmn.optional import FUSION, optional_module
from torchmn.sharded.parameter_use import Recorder


class ModelPass(Protocol):
    """The methods that parallel models call if images are cut."""

    def prepare(self, model: nn.Module) -> None:
        """Called once per model, before its first forward."""

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        """Returns the function to call with the model and its inputs: the forward of its class, or a faster one."""
        ...

    def learn(self, recorder: Recorder, learned: dict[str, Any]) -> None:
        """Called after each dry run.

        Args:
            recorder: of the dry run. Its `notes` are what the pass recorded.
            learned: name of a parameter -> data for rules, to be updated; rules find it in `Sharding.learned`.
        """


class NoPass:
    """A pass that changes nothing."""

    def prepare(self, model: nn.Module) -> None:
        pass

    def forward_of(self, model: nn.Module) -> Callable[..., Any]:
        return type(model).forward

    def learn(self, recorder: Recorder, learned: dict[str, Any]) -> None:
        pass


@cache
def model_pass() -> ModelPass:
    """Returns the pass of this process: fusion, unless `TORCHMN_FUSION=0` or its package is missing."""
    fusion = optional_module("torchmn.sharded.fusion") if FUSION else None
    return NoPass() if fusion is None else fusion.Fusion()
