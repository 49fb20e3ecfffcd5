"""All uses of torch's private API; no other file has any (checked by tests/test_torch_compat.py).

Entries are for torch 2.6 to 2.15, unless a comment names versions. For hot paths, an entry is torch's object under a
public name, or an `attrgetter`: neither costs a Python call. If a later torch lacks a name, the import of this file or
the first use of the attribute raises an error with that name, except where a fallback gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import forward_ad
from torch.nn import utils
from torch.nn.modules import module as torch_module
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils import _pytree
from torch.utils.data import DataLoader

_C: Any = torch._C
_Hooks = Mapping[int, Callable[..., Any]]
_Module = TypeVar("_Module", bound=nn.Module)

# -- tensors -----------------------------------------------------------------------------------------------------------

# Version counter: how often the tensor, or one that shares its memory, was modified in place.
version_of: Callable[[Tensor], int] = attrgetter("_version")

# Whether a tensor is zeros without memory, as derivatives may be: `data_ptr()` is 0.
is_zero_tensor: Callable[[Tensor], bool] = Tensor._is_zerotensor

# A flat copy of tensors of one dtype, and the views of it in their shapes: one call for all tensors.
flatten_tensors: Callable[[list[Tensor]], Tensor] = _flatten_dense_tensors
unflatten_tensors: Callable[[Tensor, list[Tensor]], tuple[Tensor, ...]] = _unflatten_dense_tensors

# One kernel call for a list of tensors.
foreach_copy_: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
foreach_mul_: Callable[[list[Tensor], float], None] = torch._foreach_mul_

# Size in bytes of a tensor in oneDNN's blocked layout; None if torch is built without oneDNN.
mkldnn_nbytes: Any = getattr(getattr(torch.ops.mkldnn, "_nbytes", None), "default", None)


def storage_id(x: Tensor) -> int:
    """Returns a number that `x` has in common with its views only; also for meta tensors, whose addresses are 0."""
    return x.untyped_storage()._cdata


# -- modules -----------------------------------------------------------------------------------------------------------

BatchNorm = nn.modules.batchnorm._BatchNorm
InstanceNorm = nn.modules.instancenorm._InstanceNorm

# A module's own parameters, buffers and children by name: its dicts, with None for what is registered as None.
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")

# Name of the function in which torch calls a module's hooks and forward, as it appears in stack frames.
MODULE_CALL: str = nn.Module._call_impl.__name__

forward_pre_hooks: Callable[[nn.Module], _Hooks] = attrgetter("_forward_pre_hooks")
forward_hooks: Callable[[nn.Module], _Hooks] = attrgetter("_forward_hooks")
backward_hooks: Callable[[nn.Module], tuple[_Hooks, _Hooks]] = attrgetter("_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_ALL_MODULES: tuple[_Hooks, ...] = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)

# Hooks on the gradient of a parameter; each is None or a dict.
gradient_hooks: Callable[[Tensor], tuple[_Hooks | None, _Hooks | None]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the module's own buffers that are saved in its state dict, with their names."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def made_like(module: nn.Module, kind: type[_Module]) -> _Module:
    """Returns a module of class `kind` with the attributes, buffers and hooks of `module`, but no parameters."""
    made = kind.__new__(kind)
    made.__dict__.update(module.__dict__, _parameters={})
    return made


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def metadata_of(state_dict: Any) -> dict[str, Any] | None:
    """Returns the metadata of a state dict by module prefix; None if it has none."""
    return getattr(state_dict, "_metadata", None)


def set_metadata(state_dict: Any, metadata: dict[str, Any]) -> None:
    """Sets the metadata of a state dict, which must be an OrderedDict."""
    state_dict._metadata = metadata


# -- torch functions and their modes -----------------------------------------------------------------------------------

# Context managers: torch functions call no mode and no `__torch_function__`; the second one: no `__torch_function__`.
DisableTorchFunction: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunction
DisableTorchFunctionSubclass: Callable[[], AbstractContextManager[None]] = _C.DisableTorchFunctionSubclass

# A `__torch_function__` for subclasses, as nn.Parameter has it: results are plain tensors.
plain_torch_function: Any = _C._disabled_torch_function_impl

# The active modes.
count_function_modes: Callable[[], int] = _C._len_torch_function_stack
count_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
function_modes: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack

# Type of what torch.func and torch.vmap call instead of torch functions.
OpOverload: type = torch._ops.OpOverload

# The module of C++ functions that torch.nn.functional exports or calls.
NN_FUNCTIONS: Any = _C._nn

# The functions by which torch.distributions draws samples.
DISTRIBUTION_SAMPLERS: tuple[Callable[..., Tensor], ...] = (torch._standard_gamma, torch._sample_dirichlet)

# -- autograd ----------------------------------------------------------------------------------------------------------

# Number of the backward that runs in this thread; -1 if none does.
current_backward: Callable[[], int] = _C._current_graph_task_id

# Called during a backward: registers a function to call at its end.
call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# Level of forward-mode differentiation; -1 outside. If a later torch has none: 0, so that `unpack_dual` decides.
forward_mode_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", 0)

# The innermost saved-tensor hooks, or None. Argument: also while a compiler traces.
# torch 2.6 has no such function.
top_saved_tensor_hooks: Any = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Context in which saved-tensor hooks such as save_on_cpu are not called. No effect with torch 2.6."""
    hooks = []
    while top_saved_tensor_hooks is not None and (pair := top_saved_tensor_hooks(False)) is not None:
        hooks.append(pair)
        _C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            _C._autograd._push_saved_tensors_default_hooks(pack, unpack)


if TYPE_CHECKING:

    class Function:
        """`torch.autograd.Function` with an annotated `apply`."""

        @classmethod
        def apply(cls, *args: Any) -> Any: ...
else:
    Function = torch.autograd.Function


def fast_apply(function: type[Function]) -> Callable[..., Any]:
    """Returns `function.apply` without the support of functorch's transforms, which is a third of its time."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore


def function_of_node(node: Any) -> Any:
    """Returns the torch.autograd.Function of a graph node; None for nodes of torch's operations."""
    return getattr(type(node), "_forward_cls", None)


# -- profiler ----------------------------------------------------------------------------------------------------------

# Whether a profiler of torch records this thread; and a context manager, a named range of its records.
is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled
ProfilerRange: Callable[[str], AbstractContextManager[None]] = _C._profiler._RecordFunctionFast

# -- programs that record, transform or compile ------------------------------------------------------------------------

# As torch.jit.is_tracing, without two Python calls.
is_tracing: Callable[[], bool] = _C._is_tracing

# Whether a transform of torch.func (grad, vjp, jvp, vmap, ...) is active.
is_transforming: Callable[[], bool] = _C._are_functorch_transforms_active

# As torch.compiler.disable, which imports the compiler at once: a second.
disable_dynamo: Callable[[Callable[..., Any]], Callable[..., Any]] = torch._disable_dynamo

try:
    # Not None while a compiled program runs. While one is compiled, torch.compiler.is_compiling() is True.
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler_here  # pyright: ignore
except ImportError:

    def compiler_here() -> Any:
        """Fallback: assumes a compiled program, which costs a microsecond per call."""
        return True


# -- nested arguments --------------------------------------------------------------------------------------------------

# The leaves of nested tuples, lists and dicts; and the same structure with a function applied to leaves of one type.
tree_leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves
tree_map_only: Callable[..., Any] = _pytree.tree_map_only

# -- data loaders ------------------------------------------------------------------------------------------------------


def copied_loader(loader: DataLoader, **replaced: Any) -> DataLoader:
    """Returns a copy of a loader with other attributes, which cannot be set on a loader itself."""
    made = copy(loader)
    vars(made).update(replaced, _iterator=None)
    return made


# -- optimizers --------------------------------------------------------------------------------------------------------

step_pre_hooks: Callable[[Optimizer], _Hooks] = attrgetter("_optimizer_step_pre_hooks")
STEP_PRE_HOOKS_OF_ALL_OPTIMIZERS: _Hooks = _global_optimizer_pre_hooks


def wrap_clip_grads_with_norm(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the function by which `clip_grad_norm_` scales gradients, however users import `clip_grad_norm_`."""
    clip_grad._clip_grads_with_norm_ = utils.clip_grads_with_norm_ = wrapper(clip_grad._clip_grads_with_norm_)


# -- process groups ----------------------------------------------------------------------------------------------------


def gloo_options(timeout: timedelta, hostname: str) -> Any:
    """Returns options for `dist.ProcessGroupGloo`, which then listens on the address of `hostname` only."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=hostname)]
    return options


def start_coalescing(group: Any, device: torch.device) -> None:
    """Queues the following operations of an NCCL process group until `end_coalescing`."""
    group._start_coalescing(device)


def end_coalescing(group: Any, device: torch.device) -> Any:
    """Starts the queued operations; returns the work to wait for."""
    return group._end_coalescing(device)
