"""Submodules that torch.compile took over after the model was made parallel."""

from __future__ import annotations

from torch import nn

from torchmn._torch_compat import is_compiled_in_place
from torchmn.errors import ParallelizeError
from torchmn.parallel.events import TraceGuard, guard
from torchmn.parallel.trace import compiled_modules


@guard(
    on="trace", why="what a compiled submodule computes cannot be seen, and it would compute with a part as the whole"
)
class CompiledSubmodules(TraceGuard):
    """Refuses compiled submodules; the model itself may be compiled, which compiles around it."""

    def __init__(self, model: nn.Module) -> None:
        in_place = [name for name, m in model.named_modules() if m is not model and is_compiled_in_place(m)]
        found = compiled_modules(model) + in_place
        if found:
            raise ParallelizeError(
                f"{', '.join(found)} was compiled (torch.compile) after parallelize, and what it computes can not be "
                "cut. Leave it as it is, or use mode='datapar'"
            )
