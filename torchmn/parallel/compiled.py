"""Modules that torch.compile took over: what they compute can not be seen, and so not be cut."""

from __future__ import annotations

from torch import nn

from torchmn.errors import ParallelizeError


def compiled_modules(model: nn.Module) -> list[str]:
    """The names of what `torch.compile(module)` returned, in a model; "" for the model itself."""
    return [name for name, module in model.named_modules() if type(module).__name__ == "OptimizedModule"]


def refuse_compiled_submodules(model: nn.Module) -> None:
    """An error if a submodule of a parallel model was compiled; the model itself may be, which compiles around it."""
    in_place = [name for name, m in model.named_modules() if m is not model and m._compiled_call_impl is not None]
    found = compiled_modules(model) + in_place
    if found:
        raise ParallelizeError(
            f"{', '.join(found)} was compiled (torch.compile) after parallelize, and what it computes can not be cut. "
            "Leave it as it is, or use mode='datapar'"
        )
