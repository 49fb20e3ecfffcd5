"""Recorder: notes in a dry run with what each parameter is used, from which its gradient's role follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchmn.communicators.watchdog.waits import running_frames
from torchmn.context import here
from torchmn.errors import ParallelizeError
from torchmn.trees import leaves_of


class Recorder(TorchFunctionMode):
    """Notes, while a model runs once on tensors without values, with what each parameter is used."""

    def __init__(
        self, model: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]], owners: Mapping[int, nn.Module]
    ):
        super().__init__()
        self.model = model
        self._names = {id(p): name for name, p in parameters}
        self._owners = owners  # of slices, by the id of the parameter: the module that knows it is one
        self.with_parts: set[str] = set()
        self.with_whole: set[str] = set()
        self.notes: list[Any] = []  # of a pass
        self.inside = False  # a layer that computes on plain tensors what belongs to its part

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from torchmn.sharded.tensor import ShardedTensor

        tensors = leaves_of(Tensor, (args, kwargs or {}))
        if not self.inside and not any(isinstance(x, ShardedTensor) for x in tensors) and not _only_looks(func):
            self.with_whole.update(self._names[id(x)] for x in tensors if id(x) in self._names)
        for x in tensors:
            if id(x) in self._owners and not _is_about_memory(func) and not _runs(self._owners[id(x)]):
                raise ParallelizeError(
                    f"{self._names[id(x)]} is read outside of its layer, of which each rank holds a slice: forward "
                    "would compute with the slice. Tie layers by assigning the parameter (a.weight = b.weight), "
                    "which keeps both whole, or use mode='datapar'."
                )
        return func(*args, **(kwargs or {}))

    def note_part_use(self, x: Tensor) -> None:
        """A parameter meets a ShardedTensor directly."""
        if id(x) in self._names:
            self.with_parts.add(self._names[id(x)])

    def name_of(self, x: Tensor) -> str | None:
        """What the model calls a parameter; None for any other tensor."""
        return self._names.get(id(x))


def _only_looks(func: Any) -> bool:
    """Whether a function reads an attribute (shape, dtype), which leaves no trace in the gradient."""
    return getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel", "is_floating_point")


def _is_about_memory(func: Any) -> bool:
    """Whether a function reads what a slice has in common with the whole: dtype, device."""
    told = getattr(getattr(func, "__self__", None), "__name__", "") if func_name(func) == "__get__" else func_name(func)
    return told in ("dtype", "device", "requires_grad", "is_cuda", "is_meta", "is_leaf", "dim", "is_floating_point")


def func_name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _runs(module: nn.Module) -> bool:
    """Whether a method of `module` is running. Walks the stack, which only runs without values pay for."""
    return any(frame.f_locals.get("self") is module for frame in running_frames())


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    here.recorder = recorder
    try:
        with recorder:
            yield
    finally:
        here.recorder = None


@contextmanager
def inside_a_part() -> Iterator[None]:
    """While it lasts, plain tensors are this rank's part: parameters that meet them are used with parts."""
    noting = here.recorder
    if noting is not None:
        noting.inside = True
    try:
        yield
    finally:
        if noting is not None:
            noting.inside = False
