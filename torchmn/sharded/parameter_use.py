"""Recorder: records in a dry run which parameters are used with sharded and which with whole tensors.

The role of each parameter's gradient follows from that (see `gradient_role`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchmn.communicators.watchdog.source_lines import is_library_module, running_frames
from torchmn.context import here
from torchmn.errors import ParallelizeError
from torchmn.sharded.tensor import ShardedTensor
from torchmn.trees import leaves_of

# Functions whose results are numbers, or as many tensors, as the shape has.
_SHAPES = frozenset(
    ("shape", "size", "numel", "nelement", "__len__", "nbytes", "stride", "is_same_size", "unbind", "split")
)


class Recorder(TorchFunctionMode):
    """Records the uses of parameters while a model runs on meta tensors.

    Args:
        model: the model that runs.
        parameters: its parameters, by name.
        owners: id of a parameter -> the module that holds a slice of it.

    Attributes:
        used_sharded: names of the parameters that are operands of sharded tensors.
        used_whole: names of the parameters that are operands of whole tensors.
        notes: data of an optional pass, such as fusion.
        inside: whether a layer runs that computes with shards as plain tensors (`inside_shard`).
        reads_shapes: whether code of the user has read the shape of a tensor.
    """

    def __init__(
        self, model: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]], owners: Mapping[int, nn.Module]
    ):
        super().__init__()
        self.model = model
        self._names = {id(p): name for name, p in parameters}
        self._owners = owners
        self.used_sharded: set[str] = set()
        self.used_whole: set[str] = set()
        self.notes: list[Any] = []
        self.inside = False
        self.reads_shapes = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not self.reads_shapes and _reads_shape(func):
            self.reads_shapes = _called_by_user()
        tensors = leaves_of(Tensor, (args, kwargs or {}))
        if not self.inside and not any(isinstance(x, ShardedTensor) for x in tensors) and not _reads_attribute(func):
            self.used_whole.update(self._names[id(x)] for x in tensors if id(x) in self._names)
        for x in tensors:
            if id(x) in self._owners and not _same_for_slices(func) and not _is_running(self._owners[id(x)]):
                raise ParallelizeError(
                    f"{self._names[id(x)]} is read outside of its layer, and each rank holds only a slice of it: "
                    "forward would compute with the slice. Tie layers by assigning the parameter "
                    "(a.weight = b.weight), which keeps both whole, or use mode='datapar'."
                )
        return func(*args, **(kwargs or {}))

    def note_sharded_use(self, x: Tensor) -> None:
        """Records that `x`, if it is a parameter, is an operand of a ShardedTensor."""
        if id(x) in self._names:
            self.used_sharded.add(self._names[id(x)])

    def name_of(self, x: Tensor) -> str | None:
        """Returns the name of a parameter in the model; None for any other tensor."""
        return self._names.get(id(x))


def _reads_attribute(func: Any) -> bool:
    """Whether a function only reads an attribute such as shape or dtype, which does not affect the gradient."""
    return _name_of(func) in ("__get__", "size", "dim", "numel", "is_floating_point")


def _reads_shape(func: Any) -> bool:
    """Whether a function returns numbers that depend on the shape of a tensor."""
    name = _name_of(func)
    if name == "__get__":
        name = _name_of(getattr(func, "__self__", None))
    return name in _SHAPES


def _called_by_user() -> bool:
    """Whether the torch function of a `__torch_function__` that runs was called by the user's code. Walks the stack."""
    frames = running_frames()
    next(frames)  # this one
    for frame in frames:
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name != "__torch_function__" and module not in ("torch.overrides", "torch._tensor"):
            return not is_library_module(module)
    return False


def _same_for_slices(func: Any) -> bool:
    """Whether a function reads an attribute that a slice and the whole parameter share, such as dtype or device."""
    name = _name_of(func)
    if name == "__get__":
        name = _name_of(getattr(func, "__self__", None))
    return name in ("dtype", "device", "requires_grad", "is_cuda", "is_meta", "is_leaf", "dim", "is_floating_point")


def _name_of(func: Any) -> str:
    return getattr(func, "__name__", "")


def _is_running(module: nn.Module) -> bool:
    """Whether a method of `module` is running. Walks the stack; called in dry runs only."""
    return any(frame.f_locals.get("self") is module for frame in running_frames())


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Context in which `recorder` sees all torch functions, and is `torchmn.context.here.recorder`."""
    here.recorder = recorder
    try:
        with recorder:
            yield
    finally:
        here.recorder = None


@contextmanager
def inside_shard() -> Iterator[None]:
    """Context in which a layer computes with shards as plain tensors: parameters used there are used sharded."""
    recorder = here.recorder
    if recorder is not None:
        recorder.inside = True
    try:
        yield
    finally:
        if recorder is not None:
            recorder.inside = False
