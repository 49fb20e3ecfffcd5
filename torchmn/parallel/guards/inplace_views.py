"""Guard: in-place changes of views of sharded tensors, some of which are copies."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchmn._torch_compat import storage_id
from torchmn.parallel.events import TraceGuard, guard
from torchmn.sharded.refusals import refuse
from torchmn.sharded.registry import names
from torchmn.sharded.tensor import ShardedTensor, local
from torchmn.trees import leaves_of

_VIEWS = names(
    "__getitem__ narrow select unbind chunk split split_with_sizes tensor_split squeeze unsqueeze view view_as reshape "
    "flatten unflatten transpose swapaxes swapdims permute movedim moveaxis expand expand_as"
)
_READS = {"__get__", "size", "dim", "numel", "is_floating_point", "__len__", "__hash__"}


@guard(
    on="trace",
    why="on one rank x[:, :, :2].zero_() changes x; on a cut image it would change a copy of these rows only",
)
class InplaceViews(TraceGuard):
    """Raises an error if a model changes such a copy in place and then uses the tensor of which it is a copy."""

    def __init__(self, model: nn.Module) -> None:
        self._copies: dict[int, Tensor] = {}  # storage of a copy -> the tensor of which it is a copy
        self._outdated: dict[int, str] = {}  # storage -> name of the function that should have changed it
        self._alive: list[Any] = []  # references, so that storage is not reused

    def before(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        name = getattr(func, "__name__", "")
        if name in _READS:
            return
        tensors = leaves_of(Tensor, (args, kwargs))
        for x in tensors if self._outdated else ():
            if _memory(x) in self._outdated:
                refuse(
                    f"{self._outdated[_memory(x)]!r} changes a slice or view of a cut tensor in place, and the tensor "
                    "is used again, but here the slice is a copy. Compute a new tensor, with torch.where or torch.cat"
                )
        if _is_in_place(name, kwargs) and tensors:
            self._note_change(name, tensors[0])

    def after(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if getattr(func, "__name__", "") not in _VIEWS:
            return
        source = next(iter(leaves_of(Tensor, (args, kwargs))), None)
        if isinstance(source, ShardedTensor):
            for view in leaves_of(Tensor, result):
                if _memory(view) != _memory(source):
                    self._copies[_memory(view)] = source
                    self._alive.append(view)

    def _note_change(self, name: str, x: Tensor) -> None:
        source = self._copies.get(_memory(x))
        while source is not None:
            self._outdated[_memory(source)] = name
            source = self._copies.get(_memory(source))


def _memory(x: Tensor) -> int:
    return storage_id(local(x) if isinstance(x, ShardedTensor) else x)


def _is_in_place(name: str, kwargs: dict) -> bool:
    """Whether a function changes its first argument."""
    if name in ("requires_grad_", "detach_"):
        return False
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__init__", "__index__")
    return in_place or operator or name == "__setitem__" or bool(kwargs.get("inplace"))
