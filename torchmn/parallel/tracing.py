"""Programs that record or transform a forward, instead of running it: that of a parallel model can not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchmn.errors import ParallelizeError

_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]


def refuse_tracing(leaves: Sequence[Any]) -> None:
    """An error if somebody traces or transforms the forward that is about to run with these arguments."""
    who = _who_traces(leaves)
    if who is not None:
        raise ParallelizeError(
            f"{who} of a parallel model: its forward communicates, which can not be recorded or transformed. For "
            "derivatives use backward or torch.autograd.grad; to export the model, load torchmn.full_state_dict(model) "
            "into the plain one, and export that"
        )


def _who_traces(leaves: Sequence[Any]) -> str | None:
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    if _functorch.peek_interpreter_stack() is not None:
        return "torch.func (grad, vjp, jvp, vmap, ...)"
    for x in leaves:
        if type(x) is torch.Tensor:
            continue
        if isinstance(x, fx.Proxy):
            return "torch.fx.symbolic_trace"
        if type(x).__name__ in ("FakeTensor", "FunctionalTensor"):
            return "torch.export"
    return None
