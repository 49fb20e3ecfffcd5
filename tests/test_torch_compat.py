"""torch's private API: tests of each entry of torchmn/_torch_compat.py, and that no other file uses any."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from torchmn import _torch_compat as compat

PACKAGE = Path(compat.__file__).parent

# -- no other file -----------------------------------------------------------------------------------------------------

# What subclasses of torch's classes override or call.
FOR_SUBCLASSES = "_save_to_state_dict _load_from_state_dict _step_supports_amp_scaling _conv_forward _check_input_dim"
OBJECTS = (torch.ones(1), torch.UntypedStorage(), nn.BatchNorm2d(1), nn.Conv2d(1, 1, 1), SGD([torch.ones(1)]))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


OF_TORCH = {name for thing in OBJECTS for name in dir(thing) if is_private(name)} - set(FOR_SUBCLASSES.split())
OF_TORCH |= {"_metadata", "_iterator", "_forward_cls"}  # of state dicts, loaders, nodes of the graph


def uses_of_private_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines that import, or read from torch's modules and objects, what begins with an underscore."""
    nodes, of_torch = list(ast.walk(tree)), {"torch"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom | ast.Import):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = (before + alias.name).split(".")
                if path[0] == "torch":
                    of_torch.add(alias.asname or alias.name.split(".")[0])
                    if any(map(is_private, path)):
                        yield node.lineno, ".".join(path)
    slots = [node for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"]
    own = {node.value for slot in slots for node in ast.walk(slot) if isinstance(node, ast.Constant)}
    # A class of ours may have methods and attributes of the same name: those that it defines and sets itself.
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    own |= {node.attr for node in nodes if of_self(node) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            text, is_own = ast.unparse(node), of_self(node) and node.attr in own
            if text.split(".")[0] in of_torch or (node.attr in OF_TORCH and not is_own):
                yield node.lineno, text
        elif isinstance(node, ast.Constant) and node.value in OF_TORCH - own:
            yield node.lineno, repr(node.value)
        elif isinstance(node, ast.keyword) and node.arg in OF_TORCH:
            yield node.lineno, f"{node.arg}="


def of_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def test_no_other_file_uses_the_private_api_of_torch() -> None:
    offenders = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_torch_compat.py"
        for line, text in uses_of_private_torch(ast.parse(path.read_text()))
    ]
    assert offenders == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch._C.f()",
        "from torch._utils import f",
        "from torch.utils import _pytree as pytree",
        "import torch._dynamo",
        "from torch import nn\nnn.modules.batchnorm._BatchNorm",
        "def f(x): return x._version",
        "class A:\n    def f(self): return self._parameters",
        "vars(module).update(_parameters={})",
        "getattr(module, '_buffers')",
    ],
)
def test_such_a_use_is_found(text: str) -> None:
    assert list(uses_of_private_torch(ast.parse(text)))


def test_it_imports_nothing_of_ours() -> None:
    nodes = ast.walk(ast.parse(Path(compat.__file__).read_text()))
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert not [module for module in modules if module.startswith(("torchmn", "."))]


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_a_version_counts_writes_through_views_too() -> None:
    x = torch.zeros(3)
    before = compat.version_of(x)
    x[1:].add_(1)
    assert compat.version_of(x) == before + 1
    assert compat.version_of(x.clone()) == 0


def test_zeros_without_memory_are_recognised() -> None:
    assert compat.is_zero_tensor(torch._efficientzerotensor(3))
    assert not compat.is_zero_tensor(torch.zeros(3))


def test_tensors_are_flattened_into_one_and_back() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.arange(4.0)]
    flat = compat.flatten_tensors(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 0, 1, 2, 3]
    parts = compat.unflatten_tensors(flat, tensors)
    flat.add_(1)
    assert [torch.equal(part, x + 1) for part, x in zip(parts, tensors, strict=True)] == [True] * 3


def test_lists_of_tensors_are_copied_and_multiplied_at_once() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    compat.foreach_mul_(tensors, 3.0)
    compat.foreach_copy_(tensors[:1], [torch.arange(2.0)])
    assert [x.tolist() for x in tensors] == [[0, 1], [3, 3, 3]]


@pytest.mark.skipif(compat.mkldnn_nbytes is None, reason="torch without oneDNN")
def test_bytes_of_blocks() -> None:
    assert compat.mkldnn_nbytes(torch.ones(1, 16, 4, 4).to_mkldnn()) == 16 * 4 * 4 * 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_of_a_tensor_is_that_of_its_views(device: str) -> None:
    x, other = torch.empty(4, device=device), torch.empty(4, device=device)
    assert compat.storage_id(x) == compat.storage_id(x[1:]) != compat.storage_id(other)


# -- modules -----------------------------------------------------------------------------------------------------------


def test_classes_of_normalisations_include_lazy_ones() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d):
        assert issubclass(kind, compat.BatchNorm)
    for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LazyInstanceNorm1d):
        assert issubclass(kind, compat.InstanceNorm) and not issubclass(kind, compat.BatchNorm)


def test_what_a_module_holds_can_be_read_and_replaced() -> None:
    layer, twice = nn.Linear(2, 2, bias=False), nn.ReLU()
    model = nn.Sequential(layer, twice, twice)
    model.register_buffer("seen", torch.zeros(1))
    assert list(compat.own_parameters(layer)) == ["weight", "bias"] and compat.own_parameters(layer)["bias"] is None
    assert list(compat.own_buffers(model)) == ["seen"]
    assert list(compat.own_modules(model).values()) == [layer, twice, twice]
    compat.own_parameters(layer)["weight"] = replaced = nn.Parameter(torch.ones(2, 2))
    assert layer.weight is replaced


def test_hooks_of_a_module_a_parameter_and_all_modules() -> None:
    layer = nn.Linear(2, 2)

    def hooks() -> list[bool]:
        found = [compat.forward_pre_hooks(layer), compat.forward_hooks(layer), *compat.backward_hooks(layer)]
        return [bool(each) for each in (*found, *compat.gradient_hooks(layer.weight), *compat.HOOKS_OF_ALL_MODULES)]

    def hook(*args: Any) -> None:
        return None

    modules = nn.modules.module
    register = [
        layer.register_forward_pre_hook,
        layer.register_forward_hook,
        layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
        layer.weight.register_hook,
        layer.weight.register_post_accumulate_grad_hook,
        modules.register_module_forward_pre_hook,
        modules.register_module_forward_hook,
        modules.register_module_full_backward_pre_hook,
        modules.register_module_full_backward_hook,
    ]
    assert not any(hooks())
    for number, each in enumerate(register):
        handle = each(hook)
        assert hooks() == [place == number for place in range(len(register))]
        handle.remove()
    assert not any(hooks())


def test_persistent_buffers_are_those_of_the_state_dict() -> None:
    layer = nn.BatchNorm1d(2)
    layer.register_buffer("scratch", torch.zeros(1), persistent=False)
    layer.register_buffer("nothing", None)
    layer.register_buffer("same", layer.running_mean)
    names = [name for name, _ in compat.persistent_buffers(layer)]
    assert names == [name for name in layer.state_dict() if name not in ("weight", "bias")]


def test_a_module_made_like_another_has_parameters_of_its_own() -> None:
    class Other(nn.Linear):
        pass

    layer = nn.Linear(2, 3)
    made = compat.made_like(layer, Other)
    made.register_parameter("weight", None)
    assert type(made) is Other and made.out_features == 3
    assert layer.weight is not None and "bias" not in compat.own_parameters(made)


def test_modules_are_called_in_a_function_of_that_name() -> None:
    class Caller(nn.Module):
        def forward(self) -> str:
            return sys._getframe(1).f_code.co_name

    assert Caller()() == compat.MODULE_CALL


def test_a_module_compiled_in_place_is_recognised() -> None:
    layer = nn.Linear(2, 2)
    assert not compat.is_compiled_in_place(layer)
    layer.compile(backend="eager")
    assert compat.is_compiled_in_place(layer)


def test_metadata_of_a_state_dict() -> None:
    saved = nn.BatchNorm1d(2).state_dict()
    assert compat.metadata_of(saved) == {"": {"version": 2}}
    assert compat.metadata_of({}) is None
    compat.set_metadata(state := OrderedDict(), {"": {"version": 1}})
    assert compat.metadata_of(state) == {"": {"version": 1}}


# -- torch functions and their modes -----------------------------------------------------------------------------------


class Mode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Watched(Tensor):
    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_disabled_torch_functions_call_neither_modes_nor_subclasses() -> None:
    x, Watched.seen = torch.ones(2).as_subclass(Watched), []
    with Mode() as mode:
        with compat.DisableTorchFunction():
            torch.sin(x)
        assert (mode.seen, Watched.seen) == ([], [])
        with compat.DisableTorchFunctionSubclass():
            torch.cos(x)
        assert (mode.seen, Watched.seen) == (["cos"], [])


def test_results_of_a_subclass_with_the_plain_torch_function_are_plain() -> None:
    class Plain(Tensor):
        __torch_function__ = compat.plain_torch_function

    assert type(torch.ones(2).as_subclass(Plain) + 1) is Tensor


def test_modes_that_are_entered_are_counted() -> None:
    assert (compat.count_function_modes(), compat.function_modes(), compat.count_dispatch_modes()) == (0, [], 0)
    with Mode() as outer, Mode() as inner, TorchDispatchMode():
        assert (compat.count_function_modes(), compat.count_dispatch_modes()) == (2, 1)
        assert compat.function_modes() == [outer, inner]


def test_functions_of_torch_that_have_no_public_name() -> None:
    assert compat.NN_FUNCTIONS.linear is F.linear
    assert isinstance(torch.ops.aten.sin.default, compat.OpOverload)
    assert not isinstance(torch.sin, compat.OpOverload)
    with Mode() as mode:
        torch.distributions.Gamma(torch.ones(1), torch.ones(1)).sample()
    assert set(mode.seen) & {function.__name__ for function in compat.DISTRIBUTION_SAMPLERS}


# -- autograd ----------------------------------------------------------------------------------------------------------


def test_a_backward_is_detected_and_its_end_calls_back() -> None:
    x, events = torch.ones(1, requires_grad=True), []

    def hook(gradient: Tensor) -> None:
        events.append(compat.current_backward() != -1)
        compat.call_after_backward(lambda: events.append("end"))

    x.register_hook(hook)
    x.register_post_accumulate_grad_hook(lambda _: events.append("accumulated"))
    x.sum().backward()
    assert events == [True, "accumulated", "end"]
    assert compat.current_backward() == -1


def test_the_level_of_forward_mode_differentiation() -> None:
    assert compat.forward_mode_level() == -1
    with forward_ad.dual_level():
        assert compat.forward_mode_level() == 0
    assert compat.forward_mode_level() == -1


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_the_function_of_a_node_of_the_graph() -> None:
    x = torch.ones(1, requires_grad=True)
    assert compat.function_of_node(Double.apply(x).grad_fn) is Double
    assert compat.function_of_node((2 * x).grad_fn) is None
    layer = nn.Linear(1, 1)
    layer.register_full_backward_hook(lambda *_: None)
    assert compat.function_of_node(layer(x).grad_fn) is compat.BackwardHookFunction


def test_the_fast_apply_of_a_function_has_its_value_and_gradient() -> None:
    x = torch.full((1,), 3.0, requires_grad=True)
    doubled = compat.fast_apply(Double)(x)
    assert doubled.item() == Double.apply(x).item() == 6.0
    doubled.backward()
    assert x.grad.item() == 2.0


@pytest.mark.skipif(compat.top_saved_tensor_hooks is None, reason="torch 2.6 does not show these hooks")
def test_hooks_on_saved_tensors_are_seen_and_set_aside() -> None:
    x, packed = torch.ones(1, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert compat.top_saved_tensor_hooks(True) is not None
        with compat.without_saved_tensor_hooks():
            assert compat.top_saved_tensor_hooks(True) is None
            x.square()
        assert not packed
        x.square()
    assert packed and compat.top_saved_tensor_hooks(True) is None


# -- programs that record, transform or compile ------------------------------------------------------------------------


def test_tracing_is_detected() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(compat.is_tracing())
        return x + 1

    function(torch.ones(1))
    torch.jit.trace(function, torch.ones(1), check_trace=False)
    assert seen == [False, True]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd, torch.vmap])
def test_transforms_are_detected(transform: Any) -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(compat.is_transforming())
        return (x * x).sum()

    function(torch.ones(2))
    transform(function)(torch.ones(2))
    assert seen == [False, True]


def test_uncompiled_functions_run_without_the_compiler() -> None:
    """In a new process: importing this file must not load the compiler, and torch.compile loads it."""
    text = """
import sys, torch
from torchmn import _torch_compat as compat
assert "torch._dynamo" not in sys.modules
seen = []
@compat.disable_dynamo
def plain(x):
    seen.append((torch.compiler.is_compiling(), compat.compiler_here() is None))
    return x + 1
plain(torch.ones(1))
torch.compile(lambda x: plain(2 * x), backend="eager")(torch.ones(1))
assert seen[0] == (False, True) and seen[1][0] is False, seen
"""
    subprocess.run([sys.executable, "-c", text], check=True, timeout=300)


# -- profiler ----------------------------------------------------------------------------------------------------------


def test_a_profiler_is_detected_in_its_thread_and_records_named_ranges() -> None:
    seen = []

    def in_another_thread() -> None:
        seen.append(compat.is_profiling())

    assert not compat.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        seen.append(compat.is_profiling())
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        with compat.ProfilerRange("a range"):
            torch.ones(1)
    assert (seen, compat.is_profiling()) == ([True, False], False)
    assert "a range" in [event.key for event in recorded.key_averages()]
    with compat.ProfilerRange("without a profiler"):
        pass


# -- nested arguments, loaders, optimizers, process groups -------------------------------------------------------------


def test_leaves_of_nested_arguments() -> None:
    tree = (1, [2.0, {"a": 3}])
    assert compat.tree_leaves(tree) == [1, 2.0, 3]
    assert compat.tree_map_only(int, lambda x: -x, tree) == (-1, [2.0, {"a": -3}])


def test_a_copied_loader_has_other_attributes_and_no_running_workers() -> None:
    loader = DataLoader(range(4))
    other = compat.copied_loader(loader, sampler=[3, 1])
    assert list(other.sampler) == [3, 1] and list(loader.sampler) == [0, 1, 2, 3]


def test_hooks_before_a_step() -> None:
    optimizer, before = SGD([torch.ones(1, requires_grad=True)]), len(compat.STEP_PRE_HOOKS_OF_ALL_OPTIMIZERS)
    assert not compat.step_pre_hooks(optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert len(compat.step_pre_hooks(optimizer)) == 1
    assert len(compat.STEP_PRE_HOOKS_OF_ALL_OPTIMIZERS) == before + 1  # guards of parallel models may be among them
    handle.remove()


def test_clip_grad_norm_calls_the_wrapped_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clip_grad, "_clip_grads_with_norm_", clip_grad._clip_grads_with_norm_)  # put back at the end
    monkeypatch.setattr(utils, "clip_grads_with_norm_", None, raising=False)
    calls = []

    def wrapper(function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls.append(args[1])
            return function(*args, **kwargs)

        return wrapped

    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    compat.wrap_clip_grads_with_norm(wrapper)
    utils.clip_grad_norm_([parameter], 1.0)
    assert calls == [1.0]
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
def test_gloo_connects_ranks_with_its_options() -> None:
    store, patience, sums = dist.HashStore(), timedelta(seconds=60), {}

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(store, number, 2, compat.gloo_options(patience, "127.0.0.1"))
        x = torch.tensor([number + 1.0])
        group.allreduce([x]).wait()
        sums[number] = x.item()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {0: 3.0, 1: 3.0}


def test_coalescing_starts_and_ends_with_the_device() -> None:
    """Without NCCL: checks only that the methods are called."""

    class Group:
        def _start_coalescing(self, device: torch.device) -> None:
            self.started = device

        def _end_coalescing(self, device: torch.device) -> str:
            return f"work on {device}"

    group, device = Group(), torch.device("cpu")
    compat.start_coalescing(group, device)
    assert group.started is device
    assert compat.end_coalescing(group, device) == "work on cpu"
