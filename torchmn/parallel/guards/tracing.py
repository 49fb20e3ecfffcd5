"""Guard: torch.jit.trace, torch.fx, torch.export and torch.func, which cannot trace or transform communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchmn._torch_compat import is_transforming
from torchmn.parallel.events import ForwardEvent, guard
from torchmn.trees import leaves


@guard(on="forward", why="communication would be traced as a constant, or run on one rank only")
def tracing(seen: ForwardEvent) -> str | None:
    """Returns an error if the forward is being traced or transformed."""
    parallelism = seen.parallelism
    if parallelism.mode == "datapar" and not (parallelism.grid.comm.size > 1 and seen.model.training):
        return None  # it does not communicate
    tracer = _running_tracer(seen.args if not seen.kwargs else leaves((seen.args, seen.kwargs)))
    if tracer is None:
        return None
    return (
        f"{tracer} of a parallel model: its forward communicates, which cannot be traced or transformed. For "
        "derivatives use backward or torch.autograd.grad; to export the model, load torchmn.full_state_dict(model) "
        "into the plain model, and export that"
    )


def _running_tracer(leaves: Sequence[Any]) -> str | None:
    """Returns the name of the tracer or transform that calls the forward; None for an ordinary call."""
    if torch.jit.is_tracing():
        return "torch.jit.trace"
    if is_transforming():
        return "torch.func (grad, vjp, jvp, vmap, ...)"
    for x in leaves:
        if type(x) is torch.Tensor:
            continue
        if isinstance(x, fx.Proxy):
            return "torch.fx.symbolic_trace"
        if type(x).__name__ in ("FakeTensor", "FunctionalTensor"):
            return "torch.export"
    return None
