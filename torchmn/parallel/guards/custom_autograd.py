"""Where torch computes with cut tensors past their rules: autograd functions and backward hooks.

A `torch.autograd.Function` of a user's own gets gradients of this rank's part in backward, as plain tensors. That is
right as long as it works element by element; anything else is refused in the run without values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.autograd import Function

from torchmn._torch_compat import BackwardHookFunction, function_of_node
from torchmn.communicators.watchdog.source_lines import running_frames
from torchmn.parallel.events import TraceGuard, guard
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import functions_named, rule_of
from torchmn.sharded.rules import metadata, pointwise
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves, leaves_of

_WAY_OUT = "Write it with torch functions outside of one, as a torchmn.nn.HaloLayer, or use mode='datapar'"
_VIEWS = frozenset(functions_named("view_as"))


@guard(
    on="trace",
    why="backward of a torch.autograd.Function, and a full backward hook, get the gradient of this rank's part only",
)
class CustomAutograd(TraceGuard):
    """Refuses functions that would compute with a part, or keep one for backward, as if it were the whole."""

    def before(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not leaves_of(ShardedTensor, (args, kwargs)):
            return
        function = _function_here()
        if function is BackwardHookFunction:
            refuse(
                "a full backward hook would see this rank's part of the gradient only. Use register_hook on the "
                "tensor, which gets a gradient that is cut as the tensor is"
            )
        if function is not None and not _is_element_by_element(func):
            refuse(
                f"{function.__name__} (torch.autograd.Function) calls {getattr(func, '__name__', func)!r} of a cut "
                "tensor, and its backward would get this rank's part of the gradient only: that is right for "
                f"functions that work element by element. {_WAY_OUT}"
            )

    def end(self, result: Any) -> None:
        _check_kept(result)


def _function_here() -> Any:
    """The autograd function of somebody's own, or of a backward hook, whose forward is running; None for none."""
    running = {id(code): function for function in _all_functions(Function) for code in _codes(function)}
    function = next((running[id(frame.f_code)] for frame in running_frames() if id(frame.f_code) in running), None)
    return function if function is BackwardHookFunction or _is_own(function) else None


def _all_functions(function: type) -> Iterator[type]:
    """The classes derived from this one, before those that are derived from them in turn."""
    for derived in function.__subclasses__():
        yield derived
        yield from _all_functions(derived)


def _codes(function: type) -> Iterator[Any]:
    """What runs on behalf of a function's `apply`, which itself is no Python in torch 2.15 and can not be seen."""
    for method in (vars(function).get("forward"), vars(function).get("setup_context")):
        while (inner := getattr(method, "__wrapped__", None)) is not None:
            method = inner
        yield getattr(method, "__code__", None)


def _is_own(function: Any) -> bool:
    return getattr(function, "__module__", "torch").split(".")[0] not in ("torch", "torchmn")


def _is_element_by_element(func: Any) -> bool:
    rule = rule_of(func)
    if func in _VIEWS or rule == func:  # the latter: a question about dtype, device or layout
        return True
    return getattr(rule, "func", rule).__module__ in (pointwise.__name__, metadata.__name__)


def _check_kept(result: Any) -> None:
    """Refuse functions of somebody's own that have kept a cut tensor for backward: there it meets a part's gradient.

    result: of a run without values
    """
    seen: set[Any] = set()
    nodes = [x.grad_fn for x in leaves_of(Tensor, result)]
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [before for before, _ in node.next_functions]
        function = function_of_node(node)
        if function is not None and _is_own(function) and any(isinstance(x, ShardedTensor) for x in _kept(node)):
            refuse(
                f"{function.__name__} (torch.autograd.Function) keeps a cut tensor for its backward, where it has the "
                f"shape of the whole and the gradient that of this rank's part. {_WAY_OUT}"
            )


def _kept(node: Any) -> list[Any]:
    return [*(node.saved_tensors or ()), *leaves(list(vars(node).values()))]
