"""One pass over memory in place of ten: torch's fused update, where the user left the choice to torch.

Neither `fused` nor `foreach` given means that torch chooses, and on a CPU it chooses the slowest: the fused Adam takes
a quarter to a seventh of its time, the fused SGD a half to two thirds. The formula is the same; results differ in the
last digit at most.

torch's fused kernels for the CPU walk through the memory of parameter, gradient and state side by side, whatever their
strides are: silently wrong where one of them lies in another order. So this looks before every step.

Nor do they raise version counters: a backward through a graph that is older than the step would use the new parameters
and give wrong gradients, where torch's other updates make it an error. So this raises them after every fused step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import SGD, Adam, AdamW, Optimizer

from torchmn._torch_compat import STEP_PRE_HOOKS_OF_ALL_OPTIMIZERS, step_pre_hooks

_KINDS = (SGD, Adam, AdamW)  # of a subclass nobody knows what it does with its groups
_DTYPES = (torch.float32, torch.float64)
_STRIDED = torch.strided


def update(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Let `optimizer` step, fused if it may be; its groups are afterwards what they were.

    A closure computes gradients after we have looked: with one, what is fused is what the user chose to be.
    """
    fused = []
    if type(optimizer) in _KINDS and closure is None and not _has_hooks(optimizer):
        for group in optimizer.param_groups:
            if _may_fuse(group, optimizer.state):
                group["fused"] = True
                fused.append(group)
    try:
        return optimizer.step() if closure is None else optimizer.step(closure)
    finally:
        increment_version(_written(optimizer))
        for group in fused:
            group["fused"] = None


def _written(optimizer: Optimizer) -> list[Tensor]:
    """The tensors that a fused step writes to: parameters that have a gradient, and their state."""
    written = []
    for group in optimizer.param_groups:
        if group.get("fused"):
            for p in group["params"]:
                if p.grad is not None:
                    written += [p, *optimizer.state.get(p, {}).values()]
    return [x for x in written if isinstance(x, Tensor)]


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody may put other gradients in place after we have looked; this package's own hook does not."""
    for hook in (*step_pre_hooks(optimizer).values(), *STEP_PRE_HOOKS_OF_ALL_OPTIMIZERS.values()):
        if not getattr(hook, "only_looks", False):
            return True
    return False


def _may_fuse(group: dict[str, Any], states: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Whether all that a step of this group reads and writes is on the CPU, in plain order, of an unrounded dtype."""
    if group.get("fused") is not None or group.get("foreach") is not None:
        return False  # chosen by the user
    if group.get("differentiable") or group.get("capturable") or isinstance(group["lr"], Tensor):
        return False
    have_state = set()
    for p in group["params"]:
        if p.grad is None:
            continue
        state = states.get(p) or {}
        have_state.add(bool(state))
        for x in (p, p.grad, *state.values()):
            if isinstance(x, Tensor) and not (
                x.is_cpu and x.dtype in _DTYPES and x.layout is _STRIDED and x.is_contiguous()
            ):
                return False
    return len(have_state) == 1  # the fused SGD wants the first step of all parameters, or of none
