"""dry_run: a forward on meta tensors, which finds errors and the uses of parameters before anything is computed."""

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
from torchmn.context import here
from torchmn.errors import ParallelizeError, TorchMNError
from torchmn.gradient_role import GradientRole, role_of, set_role
from torchmn.nn.layers.sliced_module import SlicedModule
from torchmn.parallel.events import GUARDS, TraceGuard
from torchmn.sharded.parameter_use import Recorder, recording
from torchmn.sharded.refusals import refuse
from torchmn.sharded.tensor import ShardedTensor, local, wrap
from torchmn.trees import leaves_of, map_only


def dry_run(
    model: nn.Module,
    forward: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    guards: Sequence[TraceGuard] | None = None,
) -> Recorder:
    """Runs a model on meta tensors, and returns how its parameters are used.

    Parameters and buffers are replaced by meta tensors during the run, so nothing is changed or communicated.
    Attributes that forward sets are restored.

    Args:
        model: the model.
        forward: called with the inputs; computes the model.
        inputs, kwargs: meta tensors.
        guards: called for each torch function; by default the guards of `trace`.

    Raises:
        Exception: any error of the model; see `explain`.
    """
    parameters = {name: _meta_parameter(p) for name, p in model.named_parameters()}
    buffers = {name: _meta_buffer(b) for name, b in model.named_buffers()}
    slices = {
        id(parameters[f"{prefix}.{name}" if prefix else name]): module
        for prefix, module in model.named_modules()
        if isinstance(module, SlicedModule)
        for name in module.sliced_parameters
    }
    recorder = Recorder(model, parameters.items(), slices)
    if guards is None:
        guards = [guard.implementation(model) for guard in GUARDS.by_event["trace"]]
    traced = _TracedModel(model, forward, guards)
    tensors = {f"model.{name}": x for name, x in (*parameters.items(), *buffers.items())}
    with (
        without_saved_tensor_hooks(),
        attributes_restored(model),
        random_states_restored(),
        MetaConstants(),
        _GuardedCalls(guards),
        recording(recorder),
    ):
        functional_call(traced, tensors, tuple(inputs), kwargs, tie_weights=True)
    return recorder


def run_with_batch(
    model: nn.Module,
    forward: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    sizes: tuple[int, int],
    guard: TraceGuard,
) -> None:
    """Runs a model on meta tensors with another batch size. This rank runs alone: operations that communicate raise.

    Args:
        model, forward, args, kwargs: as of `dry_run`.
        sizes: the size of the batch in `args`, and the one to use instead.
        guard: called for each torch function.
    """

    def resized(x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[0] != sizes[0]:
            return x
        shape, tile = (sizes[1], *x.shape[1:]), local(x)
        plain = torch.empty((sizes[1], *tile.shape[1:]), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
        return wrap(plain, x.spec.with_dims(shape, x.spec.cuts)) if isinstance(x, ShardedTensor) else plain

    args, kwargs = map_only(Tensor, resized, (args, kwargs))
    before, here.isolated = here.isolated, True
    try:
        with torch.device("meta"):  # constants of the size of the batch take no memory
            dry_run(model, forward, args, kwargs, [guard])
    finally:
        here.isolated = before


def explain(error: BaseException) -> TorchMNError:
    """Returns the error of a dry run as a TorchMNError with a hint."""
    if isinstance(error, TorchMNError):
        return error
    hint = (
        "It learns a tensor that is not one of its parameters: keep layers in nn.ModuleList and tensors in "
        "nn.ParameterList, not in a Python list."
        if "device meta" in str(error)
        else "Its forward may depend on values (if x.sum() > 0, .item()), or expect another input_shape."
    )
    return ParallelizeError(f"cannot trace the model on meta tensors: {error!s}. {hint}")


class MetaConstants(TorchFunctionMode):
    """A mode in which constants that are combined with meta tensors become meta tensors too.

    Torch refuses operands on two devices, but a model may compute `x - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)`.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = leaves_of(Tensor, (args, kwargs))
        if func is torch.tensor and any(isinstance(x, ShardedTensor) for x in tensors):
            refuse("torch.tensor of a cut tensor would copy this rank's shard only. Use x.detach().clone()")
        if len(tensors) > 1 and any(x.is_meta for x in tensors) and any(_is_constant(x) for x in tensors):
            args = map_only(Tensor, _constant_as_meta, args)
            kwargs = {name: map_only(Tensor, _constant_as_meta, value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _is_constant(x: Tensor) -> bool:
    """Whether a tensor needs no gradient. The role of a learned tensor that is not registered could not be found."""
    return not x.is_meta and x.dim() > 0 and not x.requires_grad


def _constant_as_meta(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="meta") if _is_constant(x) else x


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Context after which modules have the attributes that they had before, and no meta tensors."""
    before = [(attributes, dict(attributes)) for module in model.modules() for attributes in _attributes(module)]
    try:
        yield
    finally:
        for attributes, values in before:
            attributes.clear()
            attributes.update(values)


def _attributes(module: nn.Module) -> list[dict[str, Any]]:
    return [module.__dict__, own_parameters(module), own_buffers(module), own_modules(module)]


@contextmanager
def random_states_restored() -> Iterator[None]:
    """Context after which the random generators of torch, Python and NumPy have the state from before.

    Without effect for ranks that are threads: they share the generators, and random functions raise an error there.
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


class _GuardedCalls(TorchFunctionMode):
    """A mode that calls guards before and after each torch function of a dry run."""

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


def _meta_buffer(buffer: Tensor) -> Tensor:
    """Returns a meta tensor, but a copy of a counter: batch norm with momentum=None divides by its value."""
    if buffer.dim() == 0 and not buffer.is_floating_point():
        return buffer.clone()
    return torch.empty_like(buffer, device="meta")


def _meta_parameter(p: nn.Parameter) -> nn.Parameter:
    meta = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    role = role_of(p)
    if role.placement != "partial":  # setting this one would count as a use of the parameter
        set_role(meta, role)
    elif role.summed_in_backward:
        set_role(meta, GradientRole(summed_in_backward=True))
    return meta


class _TracedModel(nn.Module):
    """Computes `forward` of a model, and calls the guards at its end, while functional_call replaces its parameters."""

    def __init__(self, model: nn.Module, forward: Callable[..., Any], guards: Sequence[TraceGuard]):
        super().__init__()
        self.model = model
        self._forward = forward
        self._guards = guards

    def forward(self, *args: Any, **kwargs: Any) -> None:
        result = self._forward(*args, **kwargs)
        for guard in self._guards:
            guard.end(result)


def compiled_modules(model: nn.Module) -> list[str]:
    """Returns the names of the modules of a model that `torch.compile(module)` returned; "" for the model itself."""
    return [name for name, module in model.named_modules() if type(module).__name__ == "OptimizedModule"]
