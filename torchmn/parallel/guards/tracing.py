"""Programs that record or transform a forward, instead of running it: that of a parallel model can not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchmn._torch_compat import is_transforming
from torchmn.parallel.events import Forward, guard
from torchmn.trees import leaves


@guard(on="forward", why="what communicates cannot be recorded or transformed: it would run once, or on one rank")
def tracing(seen: Forward) -> str | None:
    """Refuses a forward that somebody traces or transforms."""
    parallelism = seen.parallelism
    if parallelism.mode == "datapar" and not (parallelism.grid.comm.size > 1 and seen.model.training):
        return None  # it does not communicate
    who = _who_traces(seen.args if not seen.kwargs else leaves((seen.args, seen.kwargs)))
    if who is None:
        return None
    return (
        f"{who} of a parallel model: its forward communicates, which can not be recorded or transformed. For "
        "derivatives use backward or torch.autograd.grad; to export the model, load torchmn.full_state_dict(model) "
        "into the plain one, and export that"
    )


def _who_traces(leaves: Sequence[Any]) -> str | None:
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
