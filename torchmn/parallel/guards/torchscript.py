"""Guard: TorchScript functions, which torch runs without looking up rules."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from torchmn.parallel.events import TraceGuard, guard
from torchmn.sharded.refusals import refuse
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of


@guard(
    on="trace",
    why="a TorchScript function would compute with this rank's shard as if it were the global tensor",
    replaces="torch.jit.ScriptFunction.__call__: torch has no hook before it",
)
class TorchScript(TraceGuard):
    """Raises an error if a TorchScript function is called with a sharded tensor. Installed by the first dry run."""

    def __init__(self, model: nn.Module) -> None:
        called = torch.jit.ScriptFunction.__call__
        if not isinstance(called, _Checked):
            cast(Any, torch.jit.ScriptFunction).__call__ = _Checked(called)


class _Checked:
    """`ScriptFunction.__call__` that checks its arguments."""

    def __init__(self, call: Any):
        self._call = call

    def __get__(self, function: Any, owner: Any = None) -> Any:
        return self if function is None else lambda *args, **kwargs: self._checked(function, args, kwargs)

    def _checked(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if leaves_of(ShardedTensor, (args, kwargs)):
            refuse(
                f"the TorchScript function {function.name!r} would compute with this rank's shard as if it were the "
                "global tensor. Call the plain function"
            )
        return self._call(function, *args, **kwargs)
