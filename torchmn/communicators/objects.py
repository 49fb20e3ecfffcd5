"""Operations on Python objects: anything that pickles, None too, of any size."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchmn.communicators import checks, wire
from torchmn.communicators.uncompiled import uncompiled_methods
from torchmn.communicators.watchdog import Wait
from torchmn.communicators.wire import Kind, Message
from torchmn.errors import TorchMNError

if TYPE_CHECKING:
    from torchmn.communicators.base import Communicator


# torch pickles tensors of other dtypes (uint16, float8, ...), too, but can not load what it has pickled.
_LOADED_BY_TORCH = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.dtype in _LOADED_BY_TORCH or obj.layout is not torch.strided or obj.is_cuda:
            return NotImplemented
        if obj.is_quantized:  # torch knows how, with its scales
            return NotImplemented
        flat = obj.detach().resolve_conj().resolve_neg().reshape(-1)
        return _with_dtype, (flat.view(torch.uint8), obj.dtype, tuple(obj.shape))


def _with_dtype(data: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return data.view(dtype).view(shape)


def pickled(obj: Any) -> Tensor:
    """`obj` as a uint8 tensor, pickled straight into the tensor's memory."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def unpickled(data: Tensor) -> Any:
    """The object in a uint8 tensor."""
    return pickle.loads(data.numpy().data)


def try_pickled(obj: Any) -> tuple[Tensor | None, str | None]:
    """`obj` pickled, or the problem with it."""
    try:
        return pickled(obj), None
    except Exception as error:  # pickling runs the object's own code, which may raise anything
        return None, f"expected an object that pickles, got {type(obj).__name__}: {error}"


@uncompiled_methods("send_obj recv_obj bcast_obj gather_obj allgather_obj scatter_obj allreduce_obj")
class ObjectOperations:
    """The `_obj` methods of a communicator."""

    rank: int
    size: int

    def send_obj(self: Communicator, obj: Any, dest: int, tag: int = 0) -> None:  # type: ignore[misc]
        """Send any object that pickles, without waiting for it to be received."""
        self._check_peer("send_obj", "dest", dest, tag)
        data, problem = try_pickled(obj)
        if data is None:
            self._refuse_to_send("send_obj", dest, tag, str(problem))
        self._send_message(Message(Kind.OBJECT, (data,)), dest, tag, "send_obj")  # type: ignore[arg-type]

    def recv_obj(self: Communicator, source: int, tag: int = 0) -> Any:  # type: ignore[misc]
        """The next object from `source` with this `tag`."""
        self._check_peer("recv_obj", "source", source, tag)
        message = self._recv_message(source, tag, "recv_obj")
        if message.kind != Kind.OBJECT:
            raise TorchMNError(
                f"rank {self.rank} of {self.size}: recv_obj from rank {source}, tag {tag}: expected an object, got "
                f"{len(message.tensors)} tensor(s) that were sent with send: receive them with recv"
            )
        return unpickled(message.tensors[0])

    def bcast_obj(self: Communicator, obj: Any = None, root: int = 0) -> Any:  # type: ignore[misc]
        """The object of rank `root`, on every rank."""
        with Wait(self, "bcast_obj"):
            problem = checks.rank_problem(root, self.size, "root")
            data = None
            if problem is None and self.rank == root:
                data, problem = try_pickled(obj)
            self._meet("bcast_obj", problem, ("root",), (root,))
            received = self._bcast_bytes(data, root)
            return obj if self.rank == root else pickle.loads(received)

    def gather_obj(self: Communicator, obj: Any, root: int = 0) -> list[Any] | None:  # type: ignore[misc]
        """On `root`, the list of all ranks' objects in rank order; None on other ranks."""
        with Wait(self, "gather_obj"):
            data, problem = try_pickled(obj)
            problem = checks.rank_problem(root, self.size, "root") or problem
            self._meet("gather_obj", problem, ("root",), (root,))
            assert data is not None
            counts = self._allgather_counts(data.numel())
            if self.rank != root:
                self._exchange_pieces({root: data}, {})
                return None
            room = {peer: wire.room(n) for peer, n in enumerate(counts) if peer != root}
            self._exchange_pieces({}, room)
            return [obj if peer == root else unpickled(room[peer]) for peer in range(self.size)]

    def allgather_obj(self: Communicator, obj: Any) -> list[Any]:  # type: ignore[misc]
        """The list of all ranks' objects in rank order, on every rank."""
        return self._allgather_checked("allgather_obj", obj)

    def scatter_obj(self: Communicator, objs: Sequence[Any] | None = None, root: int = 0) -> Any:  # type: ignore[misc]
        """This rank's element of the `size` objects that `root` passes."""
        with Wait(self, "scatter_obj"):
            problem = checks.rank_problem(root, self.size, "root")
            parts: list[Tensor] = []
            if problem is None and self.rank == root:
                parts, problem = _pickled_parts(objs, self.size)
            self._meet("scatter_obj", problem, ("root",), (root,))
            if self.rank == root:
                assert objs is not None
                self._bcast_bytes(json.dumps([part.numel() for part in parts]).encode(), root)
                self._exchange_pieces({peer: part for peer, part in enumerate(parts) if peer != root}, {})
                return objs[root]
            mine = wire.room(json.loads(self._bcast_bytes(None, root))[self.rank])
            self._exchange_pieces({}, {root: mine})
            return unpickled(mine)

    def allreduce_obj(self: Communicator, obj: Any, op: Callable[[Any, Any], Any] | None = None) -> Any:  # type: ignore[misc]
        """All ranks' objects joined in rank order by `op`, or by `+`, on every rank."""
        return reduce(op or add, self._allgather_checked("allreduce_obj", obj))

    def _allgather_checked(self: Communicator, operation: str, obj: Any) -> list[Any]:  # type: ignore[misc]
        with Wait(self, operation):
            data, problem = try_pickled(obj)
            self._meet(operation, problem)
            assert data is not None
            return self._allgather_pickled(obj, data)

    def _allgather_counts(self: Communicator, count: int) -> list[int]:  # type: ignore[misc]
        counts = self._allgather_whole(torch.tensor([count], device="cpu"), [1] * self.size)
        return counts.tolist()

    def _allgather_pickled(self: Communicator, obj: Any, data: Tensor | None = None) -> list[Any]:  # type: ignore[misc]
        """All ranks' objects, with no check before: the path that the checks themselves use."""
        data = pickled(obj) if data is None else data
        counts = self._allgather_counts(data.numel())
        parts = self._allgather_whole(data, counts).split(counts)
        return [obj if peer == self.rank else unpickled(part) for peer, part in enumerate(parts)]

    def _allgather_json(self: Communicator, value: Any) -> list[Any]:  # type: ignore[misc]
        """All ranks' values of JSON, with no check before: what ranks exchange of their own accord needs no pickle."""
        data = wire.from_bytes(json.dumps(value).encode())
        counts = self._allgather_counts(data.numel())
        parts = self._allgather_whole(data, counts).split(counts)
        return [json.loads(wire.to_bytes(part)) for part in parts]


def _pickled_parts(objs: Any, size: int) -> tuple[list[Tensor], str | None]:
    """One pickled tensor per rank, or the problem with `objs`."""
    if not isinstance(objs, list | tuple) or len(objs) != size:
        return [], f"expected a list or tuple of {size} objects, one per rank, got {checks.describe(objs)}"
    parts: list[Tensor] = []
    for place, obj in enumerate(objs):
        data, problem = try_pickled(obj)
        if data is None:
            return [], f"element {place}: {problem}"
        parts.append(data)
    return parts, None
