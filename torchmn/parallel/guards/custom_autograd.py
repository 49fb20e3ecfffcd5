"""Guard: custom autograd functions and full backward hooks, whose backward bypasses the rules of sharded tensors.

The backward of a user's `torch.autograd.Function` gets the gradient of this rank's shard as a plain tensor. That is
right for elementwise functions only; others raise an error in the dry run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from torchmn._torch_compat import BackwardHookFunction, function_of_node
from torchmn.communicators.watchdog.source_lines import running_frames
from torchmn.parallel.events import TraceGuard, guard
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import functions_named, rule_of
from torchmn.sharded.rules import metadata, pointwise
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves, leaves_of

_WHAT_TO_DO = "Write it with torch functions without a Function, as a torchmn.nn.HaloLayer, or use mode='datapar'"
_VIEWS = frozenset(functions_named("view_as"))


@guard(
    on="trace",
    why="backward of a torch.autograd.Function, and a full backward hook, get the gradient of this rank's shard only",
)
class CustomAutograd(TraceGuard):
    """Raises an error for functions that compute with a shard, or save one, as if it were the global tensor."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self._known: set[type] = set()
        self._by_code: dict[int, type] = {}  # by the ids of what they run; torch has hundreds of functions

    def before(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not leaves_of(ShardedTensor, (args, kwargs)):
            return
        function = self._running_function()
        if function is BackwardHookFunction:
            refuse(
                "a full backward hook would get this rank's shard of the gradient only. Use register_hook on the "
                "tensor, which gets the gradient as a sharded tensor"
            )
        if function is not None and not _is_elementwise(func):
            refuse(
                f"{function.__name__} (torch.autograd.Function) calls {getattr(func, '__name__', func)!r} of a cut "
                "tensor, and its backward would get this rank's shard of the gradient only: that is right for "
                f"elementwise functions. {_WHAT_TO_DO}"
            )

    def end(self, result: Any) -> None:
        _check_saved(result)

    def _running_function(self) -> Any:
        """Returns the user's autograd function, or that of a backward hook, whose forward is running, or None."""
        for function in _all_functions(Function):  # in each call, because a forward may define a new one
            if function not in self._known:
                self._known.add(function)
                self._by_code.update({id(code): function for code in _codes(function)})
        codes = (id(frame.f_code) for frame in running_frames())
        function = next((self._by_code[code] for code in codes if code in self._by_code), None)
        return function if function is BackwardHookFunction or _is_custom(function) else None


def _all_functions(function: type) -> Iterator[type]:
    """Yields all subclasses, directly derived ones first."""
    for derived in function.__subclasses__():
        yield derived
        yield from _all_functions(derived)


def _codes(function: type) -> Iterator[Any]:
    """Yields the code objects that `apply` of a function runs; in torch 2.15 `apply` itself has no Python frame."""
    for method in (vars(function).get("forward"), vars(function).get("setup_context")):
        while (inner := getattr(method, "__wrapped__", None)) is not None:
            method = inner
        yield getattr(method, "__code__", None)


def _is_custom(function: Any) -> bool:
    return getattr(function, "__module__", "torch").split(".")[0] not in ("torch", "torchmn")


def _is_elementwise(func: Any) -> bool:
    rule = rule_of(func)
    if func in _VIEWS or rule == func:  # the latter: attributes such as dtype, device or layout
        return True
    return getattr(rule, "func", rule).__module__ in (pointwise.__name__, metadata.__name__)


def _check_saved(result: Any) -> None:
    """Raises an error if a custom function in the graph of `result` has saved a sharded tensor for backward."""
    seen: set[Any] = set()
    nodes = [x.grad_fn for x in leaves_of(Tensor, result)]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        function = function_of_node(node)
        if function is not None and _is_custom(function) and any(isinstance(x, ShardedTensor) for x in _saved(node)):
            refuse(
                f"{function.__name__} (torch.autograd.Function) saves a cut tensor for its backward, where it has the "
                f"global shape, and the gradient that of this rank's shard. {_WHAT_TO_DO}"
            )


def _saved(node: Any) -> list[Any]:
    return [*(node.saved_tensors or ()), *leaves(list(vars(node).values()))]
