"""Guard: functions that combine the samples of a batch, of which each rank along `data` has only its part.

The model runs once on meta tensors with a batch of a size that nothing else has. A dim of that size, or a multiple of
it, holds the samples, whatever the model did to the tensor before. A function combines samples if it works along such
a dim, or if its result has no such dim any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torchmn._torch_compat import is_compiled_in_place
from torchmn.communicators.communicator import Communicator
from torchmn.errors import ParallelizeError
from torchmn.parallel.events import SamplesEvent, TraceGuard, guard
from torchmn.parallel.trace import compiled_modules
from torchmn.sharded.combined_dims import combined_dims
from torchmn.sharded.refusals import where
from torchmn.sharded.registry import name_of
from torchmn.trees import leaves_of

_BATCH = 12 * 1009  # models may divide it into halves or quarters; their other sizes are no multiples of 1009
_WHAT_TO_DO = (
    "Compute it from the output, outside of the model, or use a grid without the axis data (batch normalisation and "
    "losses work)"
)
# Functions whose result depends on the shape or type of their argument only.
_NOT_OF_VALUES = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "__len__", "set_", "backward")
# Parts of two batches that were joined may be these batches.
_PARTS = ("split", "split_with_sizes", "chunk", "tensor_split", "narrow")
# Functions of whose other arguments only the type or shape counts.
_LIKE_FIRST = ("to", "type_as", "view_as", "reshape_as", "expand_as")
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "view_as")
_KEEP_ROWS = ("to", "long", "int", "view", "reshape", "unsqueeze", "squeeze", "expand", "__getitem__", "type_as", "cpu")


@guard(
    on="samples",
    why="a function along the batch dim combines this rank's samples only, instead of those of the global batch",
)
def sample_mixing(seen: SamplesEvent) -> str | None:
    """Returns an error for a model whose result for a sample depends on other samples of the batch."""
    modules = list(seen.model.modules())
    if compiled_modules(seen.model) or any(is_compiled_in_place(m) or _communicates(m) for m in modules):
        return None
    tracker = _SampleTracker(seen.model)
    try:
        seen.run(_BATCH, tracker)
    except Exception:
        return tracker.problem  # None: the model reads values, or needs a batch of its size
    return tracker.problem


def _communicates(module: nn.Module) -> bool:
    """Whether a layer has a communicator, as those with statistics over ranks have."""
    return any(isinstance(value, Communicator) for value in vars(module).values())


class _Mixed:
    """What combined the samples of a tensor.

    Attributes:
        function: its name, for the error.
        is_total: whether the tensor is a sum or mean over everything, such as a loss, of which ranks have their parts.
    """

    def __init__(self, x: Tensor, function: str, is_total: bool):
        self.tensor = x  # kept, so that no other tensor gets its id
        self.function = function
        self.is_total = is_total


class _SampleTracker(TraceGuard):
    """Follows the samples through a model.

    Attributes:
        problem: the error, if samples were combined.
    """

    def __init__(self, model: nn.Module):
        self.problem: str | None = None
        self._mixed: dict[int, _Mixed] = {}
        self._rows: dict[int, Tensor] = {}  # results of arange: indices of the samples in their order

    def before(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        name, x = name_of(func), args[0] if args else None
        if not isinstance(x, Tensor) or not _sample_dims(x):
            return
        if name in ("__getitem__", "__setitem__"):
            self._check_index(x, args[1], name)
        elif name.startswith("unique") and {*combined_dims(name, x.dim(), args[1:], kwargs)} & {*_sample_dims(x)}:
            self._refuse(name, x)  # on meta tensors it raises an error

    def after(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        name = name_of(func)
        operands = leaves_of(Tensor, args[:1] if name in _LIKE_FIRST else (args, kwargs))
        results = operands[:1] if name == "__setitem__" else leaves_of(Tensor, result)
        if name in _NOT_OF_VALUES or not results:
            return
        self._follow_rows(name, operands, results)
        x = operands[0] if operands and name not in _PARTS else None
        is_along = x is not None and {*combined_dims(name, x.dim(), args[1:], kwargs)} & {*_sample_dims(x)}
        mixed = [self._mixed[id(x)] for x in operands if id(x) in self._mixed]
        samples = [x for x in operands if _sample_dims(x)]
        for y in results:
            if not _sample_dims(y):
                if mixed:
                    self._mark(y, next((m for m in mixed if not m.is_total), mixed[0]))
                elif samples:
                    self._mark(y, _Mixed(y, name, y.dim() == 0 and _is_loss(name)))
            elif mixed:
                self._refuse(mixed[0].function, y)
            elif is_along or (samples and _pairs_or_moves(name, samples, y)):
                self._refuse(name, y)

    def end(self, result: Any) -> None:
        for y in leaves_of(Tensor, result):
            mixed = self._mixed.get(id(y))
            if mixed is not None and not (mixed.is_total and y.dim() == 0):
                self._refuse(mixed.function, y)

    def _mark(self, y: Tensor, mixed: _Mixed) -> None:
        self._mixed[id(y)] = _Mixed(y, mixed.function, mixed.is_total)

    def _check_index(self, x: Tensor, index: Any, name: str) -> None:
        """Refuses an index that selects or reorders samples; a slice of these is found by the size of the result."""
        entries = index if isinstance(index, tuple) else (index,)
        entries = [entry for entry in entries if entry is not None]
        if Ellipsis in [entry for entry in entries if not isinstance(entry, Tensor)]:
            at = next(i for i, entry in enumerate(entries) if entry is Ellipsis)
            entries[at : at + 1] = [slice(None)] * (x.dim() - len(entries) + 1)
        for dim, entry in enumerate(entries):
            if dim >= x.dim() or dim not in _sample_dims(x) or isinstance(entry, slice):
                continue
            is_row = isinstance(entry, Tensor) and (id(entry) in self._rows or entry.dtype.itemsize == 1)
            if not is_row and (isinstance(entry, Tensor | list) or name == "__setitem__"):
                self._refuse(f"an index of the samples ({name})", x)

    def _follow_rows(self, name: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        if (name == "arange" and results[0].numel() == _BATCH) or (
            name in _KEEP_ROWS and operands and all(id(x) in self._rows for x in operands)
        ):
            self._rows[id(results[0])] = results[0]

    def _refuse(self, function: str, x: Tensor) -> None:
        self.problem = (
            f"{where()}: {function} combines samples of the batch, and each rank along 'data' has only its samples, "
            f"which would give other numbers than one rank. {_WHAT_TO_DO}"
        )
        raise ParallelizeError(self.problem)


def _sample_dims(x: Tensor) -> list[int]:
    """Returns the dims that hold the samples."""
    return [dim for dim, extent in enumerate(x.shape) if extent and extent % _BATCH == 0]


def _is_loss(name: str) -> bool:
    return name in ("sum", "mean", "nansum", "nanmean", "cross_entropy") or name.endswith("_loss")


def _pairs_or_moves(name: str, operands: Sequence[Tensor], y: Tensor) -> bool:
    """Whether a result has pairs of samples, or comes from a reshape that gives a sample elements of others."""
    return len(_sample_dims(y)) > max(len(_sample_dims(x)) for x in operands) or (
        name in _RESHAPES and _moves_samples(operands[0], y)
    )


def _moves_samples(before: Tensor, after: Tensor) -> bool:
    """Whether a reshape from (batch, n, ...) to (n, batch, ...) gives each sample elements of others."""
    old, new = list(before.shape), list(after.shape)
    if _BATCH not in old or _BATCH not in new:
        return False  # joined with another dim, in an order that the shape does not show
    return _product(old[: old.index(_BATCH)]) != _product(new[: new.index(_BATCH)])


def _product(extents: Sequence[int]) -> int:
    result = 1
    for extent in extents:
        result *= extent
    return result
