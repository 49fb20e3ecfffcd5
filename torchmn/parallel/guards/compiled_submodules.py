"""Guard: submodules that were compiled by torch.compile after the model was made parallel."""

from __future__ import annotations

from torch import nn

from torchmn._torch_compat import is_compiled_in_place
from torchmn.errors import ParallelizeError
from torchmn.parallel.events import TraceGuard, guard
from torchmn.parallel.trace import compiled_modules


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
