"""TorchScript functions, which torch runs without asking for rules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchmn.parallel.events import TraceGuard, guard
from torchmn.sharded.refusals import refuse
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of


@guard(
    on="trace",
    why="a TorchScript function would compute with this rank's part of a cut tensor as if it were the whole",
    replaces="torch.jit.ScriptFunction.__call__: torch has no hook before it runs one",
)
class Scripts(TraceGuard):
    """From the first run without values on, TorchScript functions refuse cut tensors."""

    def __init__(self, model: nn.Module) -> None:
        called = torch.jit.ScriptFunction.__call__
        if not isinstance(called, _Checked):
            torch.jit.ScriptFunction.__call__ = _Checked(called)  # type: ignore[method-assign]


class _Checked:
    """`ScriptFunction.__call__`, with a look at its arguments."""

    def __init__(self, call: Any):
        self._call = call

    def __get__(self, function: Any, owner: Any = None) -> Any:
        return self if function is None else lambda *args, **kwargs: self._checked(function, args, kwargs)

    def _checked(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if leaves_of(ShardedTensor, (args, kwargs)):
            refuse(
                f"the TorchScript function {function.name!r} would compute with this rank's part of a cut tensor as if "
                "it were the whole. Call the plain function"
            )
        return self._call(function, *args, **kwargs)
