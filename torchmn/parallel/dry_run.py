"""A run of a model on tensors without values: finds what can not be computed in parts, before anything is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from torchmn._torch_compat import without_saved_tensor_hooks
from torchmn.errors import ParallelizeError, TorchMNError
from torchmn.gradient_role import GradientRole, role_of, set_role
from torchmn.nn.slices import SlicedModule
from torchmn.parallel.events import GUARDS, TraceGuard
from torchmn.parallel.without_values import (
    ConstantsWithoutValues,
    attributes_kept,
    random_states_kept,
)
from torchmn.sharded.roles import Recorder, recording


def dry_run(model: nn.Module, forward: Callable[..., Any], inputs: Sequence[Any], kwargs: dict[str, Any]) -> Recorder:
    """What the parameters of `model` meet when `forward` computes `inputs`, which are on the device "meta".

    Parameters and buffers are replaced by ones without values while it runs, so nothing is changed or communicated;
    what forward keeps in attributes is forgotten.
    """
    parameters = {name: _without_values(p) for name, p in model.named_parameters()}
    buffers = {name: _copied(b) for name, b in model.named_buffers()}
    slices = {
        id(parameters[f"{prefix}.{name}" if prefix else name]): module
        for prefix, module in model.named_modules()
        if isinstance(module, SlicedModule)
        for name in module.cut_parameters
    }
    recorder = Recorder(model, parameters.items(), slices)
    guards = [guard.look(model) for guard in GUARDS.by_event["trace"]]
    holder = _Holder(model, forward, guards)
    tensors = {f"model.{name}": x for name, x in (*parameters.items(), *buffers.items())}
    with (
        without_saved_tensor_hooks(),
        attributes_kept(model),
        random_states_kept(),
        ConstantsWithoutValues(),
        _Watched(guards),
        recording(recorder),
    ):
        functional_call(holder, tensors, tuple(inputs), kwargs, tie_weights=True)
    return recorder


class _Watched(TorchFunctionMode):
    """Lets guards see the torch functions that a run without values calls."""

    def __init__(self, guards: Sequence[TraceGuard]):
        super().__init__()
        self._guards = guards

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for guard in self._guards:
            guard.before(func, args, kwargs)
        result = func(*args, **kwargs)
        for guard in self._guards:
            guard.after(func, args, kwargs, result)
        return result


def _copied(buffer: Tensor) -> Tensor:
    """Without values; a counter keeps its own, because batch norm with momentum=None divides by it."""
    if buffer.dim() == 0 and not buffer.is_floating_point():
        return buffer.clone()
    return torch.empty_like(buffer, device="meta")


def _without_values(p: nn.Parameter) -> nn.Parameter:
    meta = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    role = role_of(p)
    if role.placement != "partial":  # which would count as a use of the parameter
        set_role(meta, role)
    elif role.summed_in_backward:
        set_role(meta, GradientRole(summed_in_backward=True))
    return meta


class _Holder(nn.Module):
    """Runs a forward of `model` that is not the one it has; guards see how it ends while parameters are replaced."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], guards: Sequence[TraceGuard]):
        super().__init__()
        self.model = model
        self._forward = forward
        self._guards = guards

    def forward(self, *args: Any, **kwargs: Any) -> None:
        result = self._forward(*args, **kwargs)
        for guard in self._guards:
            guard.end(result)


def explained(error: BaseException) -> TorchMNError:
    """The error of a dry run as one that says what to do."""
    if isinstance(error, TorchMNError):
        return error
    hint = (
        "It learns a tensor that is no parameter of it: keep layers in nn.ModuleList, tensors in nn.ParameterList, and "
        "no Python list."
        if "device meta" in str(error)
        else "Its forward may look at values (if x.sum() > 0, .item()), or expect another input_shape."
    )
    return ParallelizeError(
        f"the model can not be run on tensors without values, which finds out what is cut how: {error!s}. {hint}"
    )
