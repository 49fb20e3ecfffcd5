"""A run of a model on tensors without values: finds what can not be computed in parts, before anything is."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from torchmn._torch_compat import own_buffers, own_modules, own_parameters, without_saved_tensor_hooks
from torchmn.errors import ParallelizeError, TorchMNError
from torchmn.gradient_role import GradientRole, role_of, set_role
from torchmn.nn.layers.slices import SlicedModule
from torchmn.parallel.events import GUARDS, TraceGuard
from torchmn.sharded.refusals import refuse
from torchmn.sharded.roles import Recorder, recording
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of, map_only


def compiled_modules(model: nn.Module) -> list[str]:
    """The names of what `torch.compile(module)` returned, in a model; "" for the model itself."""
    return [name for name, module in model.named_modules() if type(module).__name__ == "OptimizedModule"]


class ConstantsWithoutValues(TorchFunctionMode):
    """While it lasts, a constant that meets a tensor without values loses its own: torch computes on one device only.

    So a model may write `x - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)`, as it may on one CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = leaves_of(Tensor, (args, kwargs))
        if func is torch.tensor and any(isinstance(x, ShardedTensor) for x in tensors):
            refuse("torch.tensor of a cut tensor would copy this rank's part alone. Use x.detach().clone()")
        if len(tensors) > 1 and any(x.is_meta for x in tensors) and any(_is_constant(x) for x in tensors):
            args = map_only(Tensor, _without_values, args)
            kwargs = {name: map_only(Tensor, _without_values, value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_constant(x: Tensor) -> bool:
    """Not what learns: the role of a parameter that no module has registered could not be found."""
    return not x.is_meta and x.dim() > 0 and not x.requires_grad


def _without_values(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta") if _is_constant(x) else x


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards modules have the attributes that they had before: none keeps what a run without values left there."""
    before = [(module, [(held, dict(held)) for held in _attributes(module)]) for module in model.modules()]
    try:
        yield
    finally:
        for _, dicts in before:
            for held, values in dicts:
                held.clear()
                held.update(values)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Afterwards the generators of torch, Python and NumPy are as before: the next forward draws what the first would.

    Not for ranks that are threads: they share the generators, and a model that draws from them is refused there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    return [module.__dict__, own_parameters(module), own_buffers(module), own_modules(module)]


def dry_run(model: nn.Module, forward: Callable[..., Any], inputs: Sequence[Any], kwargs: dict[str, Any]) -> Recorder:
    """What the parameters of `model` meet when `forward` computes `inputs`, which are on the device "meta".

    Parameters and buffers are replaced by ones without values while it runs, so nothing is changed or communicated;
    what forward keeps in attributes is forgotten.
    """
    parameters = {name: _meta_parameter(p) for name, p in model.named_parameters()}
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


def _meta_parameter(p: nn.Parameter) -> nn.Parameter:
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
