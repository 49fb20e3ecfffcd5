"""Guards: submodules that torch.compile compiled after the model was made parallel, and TorchScript functions."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from torchmn._torch_compat import is_compiled_in_place
from torchmn.errors import ParallelizeError
from torchmn.parallel.events import TraceGuard, guard
from torchmn.parallel.trace import compiled_modules
from torchmn.sharded.refusals import refuse
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of


@guard(on="trace", why="a compiled submodule would compute with this rank's shard as if it were the global tensor")
class CompiledSubmodules(TraceGuard):
    """Raises an error for compiled submodules. The model itself may be compiled, which compiles the code around it."""

    def __init__(self, model: nn.Module) -> None:
        in_place = [name for name, m in model.named_modules() if m is not model and is_compiled_in_place(m)]
        found = compiled_modules(model) + in_place
        if found:
            raise ParallelizeError(
                f"{', '.join(found)} was compiled (torch.compile) after parallelize, so its computation cannot be cut. "
                "Leave it uncompiled, or use mode='datapar'"
            )


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
