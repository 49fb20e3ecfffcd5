"""Communicator: the contract of all transports, and every meaning that they share.

Everything a user can see is decided here, once: which arguments are right, what all ranks must agree on, what is
returned. `buffers` moves whole buffers, `transport` says what each transport must provide for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from torchmn.communicators import agreement, checks, forks, models, ownership, reductions, wire  # noqa: F401
from torchmn.communicators.agreement import Agreement, Noted, Operation
from torchmn.communicators.buffers import BLOCK_BYTES, Buffers, StartedExchange
from torchmn.communicators.edges import EdgeBook
from torchmn.communicators.objects import ObjectOperations
from torchmn.communicators.old_names import OldNames
from torchmn.communicators.settings import Settings
from torchmn.communicators.topology import Place, Topology, groups
from torchmn.communicators.uncompiled import OPERATIONS, uncompiled_methods
from torchmn.communicators.watchdog import FINALIZE, Token, Wait, here
from torchmn.communicators.wire import Kind, Message
from torchmn.errors import ArgumentError, PeerError, TorchMNError

SPLIT, BARRIER = Operation("split"), Operation("barrier")
BCAST, SCATTER = Operation("bcast", ("root",)), Operation("scatter", ("root",))
GATHER = Operation("gather", ("root", "dtype"), ragged=True)
ALLGATHER = Operation("allgather", ("dtype",), ragged=True)
ALLTOALL = Operation("alltoall", ("dtype",), ragged=True)
ALLREDUCE = Operation("allreduce", ("dtype", "shape", "op"))
REDUCE_SCATTER = Operation("reduce_scatter", ("dtype", "shapes", "op"))

Result = TypeVar("Result")


@uncompiled_methods(OPERATIONS)
class Communicator(ObjectOperations, Buffers, OldNames):
    """A group of ranks that can send to each other and act together.

    Operations on tensors return new, detached tensors (`bcast` the root's own). A wrong argument on one rank of a
    collective operation raises on every rank of it, before anything is sent. A wait longer than `timeout` ends the
    job with a table of what each rank was doing.
    """

    def __init__(self, place: Place, settings: Settings):
        self.rank = place.rank
        self.size = len(place.hosts)
        self.name = place.name
        self.settings = settings
        self._place = place
        self._topology = Topology.of(place.hosts, place.rank)
        self._watch = place.watch
        self._world_ranks = place.world_ranks
        self._collectives = 0
        self._splits = 0
        self._closed = False
        self._owner: ref[Token] | None = None  # the thread to which collective operations belong
        self._edges = EdgeBook()
        self._calls = 0  # of differentiable collective operations
        self._agreement: Agreement | None = None  # the one in whose body this rank is
        self._noted: Noted | None = None  # what the next agreement carries on behalf of another layer
        self._block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        self._block_view = self._block.numpy().data
        self._watch.communicators.add(self)

    # -- what a user asks of a communicator --------------------------------------------------------------------

    @property
    def intra_rank(self) -> int:
        """Place of this rank among the communicator's ranks on this host."""
        return self._topology.intra_rank

    @property
    def intra_size(self) -> int:
        """Number of the communicator's ranks on this host."""
        return self._topology.intra_size

    @property
    def inter_rank(self) -> int:
        """Number of this host; hosts are numbered by their smallest rank."""
        return self._topology.inter_rank

    @property
    def inter_size(self) -> int:
        """Number of hosts."""
        return self._topology.inter_size

    @property
    def max_message_bytes(self) -> int:
        """Larger buffers travel in pieces of this size; the same on all ranks."""
        return self.settings.max_message_bytes

    @max_message_bytes.setter
    def max_message_bytes(self, value: int) -> None:
        self.settings.max_message_bytes = value

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception the other ranks may never receive what is still on its way: do not wait for them.
        if kind is None:
            self.finalize()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: rank {self.rank} of {self.size}>"

    def __deepcopy__(self, _: Any) -> Communicator:
        return self  # a copy of a model talks to the same ranks

    def __reduce__(self) -> Any:
        raise ArgumentError(
            f"{self!r}, and a model with it, belongs to the ranks of its job and can not be pickled. Save "
            "model.state_dict(), or torchmn.full_state_dict(model) of a parallel model, which holds global tensors"
        )

    def finalize(self) -> None:
        """Wait until everything sent has been received, then give the communicator back. Twice is fine."""
        if self._closed:
            return
        self._edges.settle(self)
        with Wait(self, FINALIZE):
            self._flush()
        self._closed = True
        self._close()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks with the same `color`, ordered by `key` and then by rank, as MPI's split.

        Every rank must call it; a rank with `color=None` takes part and gets None.
        """
        problem = None
        if color is not None and not isinstance(color, int):
            problem = f"expected color to be an int or None, got {color!r}"
        elif not isinstance(key, int):
            problem = f"expected key to be an int, got {key!r}"
        with Agreement(self, SPLIT, problem), torch.inference_mode(False):  # the new one will be used outside, too
            choices = self._allgather_plain((color, key))
            self._splits += 1
            members_of = groups(choices)
            name = f"{self.name}/{self._splits}.{color}"
            return self._subgroup(members_of, color, name)

    # -- point to point ----------------------------------------------------------------------------------------

    def send(self, x: Tensor | Sequence[Tensor], dest: int, tag: int = 0) -> None:
        """Send a tensor, or a tuple or list of tensors, to `dest`, without waiting for it to be received.

        The caller may change `x` as soon as this returns. Messages with the same `tag` arrive in order.
        """
        self._check_peer("send", "dest", dest, tag)
        if isinstance(x, Tensor) and self._send_at_once(x, dest, tag):
            return
        many = isinstance(x, list | tuple)
        for item in x if many else (x,):
            problem = checks.tensor_problem(item)
            if problem:
                self._refuse_to_send("send", dest, tag, f"{problem} (for other objects: send_obj)")
        tensors = tuple(x) if many else (x,)  # type: ignore[assignment]
        self._send_message(Message(Kind.TUPLE if many else Kind.TENSOR, tensors), dest, tag)  # type: ignore[arg-type]

    def recv(self, source: int, tag: int = 0) -> Any:
        """The next message from `source` with this `tag`: a tensor, or a tuple if a tuple or list was sent."""
        self._check_peer("recv", "source", source, tag)
        message = self._recv_message(source, tag)
        if message.kind == Kind.OBJECT:
            raise TorchMNError(
                f"rank {self.rank} of {self.size}: recv from rank {source}, tag {tag}: expected tensors, got an object "
                "that was sent with send_obj: receive it with recv_obj"
            )
        if message.edge:  # the sender hopes for a gradient, and what this returns is detached
            self._edges.unneeded.append((source, message.edge))
        return message.payload()

    def _send_message(self, message: Message, dest: int, tag: int, operation: str = "send") -> None:
        """Detach, stage and post the tensors of a checked message."""
        given = message.tensors
        message.tensors = tuple([self._outgoing(x) for x in given])
        message.on_gpu = tuple([x.is_cuda for x in given])
        if not any(message.on_gpu):
            message.on_gpu = ()
        copied = [mine.data_ptr() != theirs.data_ptr() for mine, theirs in zip(message.tensors, given, strict=True)]
        message.private = message.kind == Kind.OBJECT or all(copied)
        self._post(message, dest, tag)

    def _recv_message(self, source: int, tag: int, operation: str = "recv") -> Message:
        if self._edges.unneeded:
            self._edges.say_unneeded(self)
        with Wait(self, operation, source, tag):
            message = self._take(source, tag)
        return self._accepted(message, source, tag, operation)

    def _accepted(self, message: Message, source: int, tag: int, operation: str = "recv") -> Message:
        """A message that has come, on the device where it belongs, unless it says that its sender failed."""
        if message.kind == Kind.ERROR:
            reason = wire.to_bytes(message.tensors[0]).decode()
            raise PeerError(f"rank {self.rank} of {self.size}: {operation} from rank {source}, tag {tag}: {reason}")
        return self._placed(message)

    def _claim(self, operation: str) -> None:
        ownership.claim(self, operation)

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise TorchMNError(f"rank {self.rank} of {self.size}: {operation} {self.closed_because}")

    def _check_peer(self, operation: str, name: str, peer: object, tag: object) -> None:
        here.watch = self._watch
        if type(peer) is int and 0 <= peer < self.size and peer != self.rank and not self._closed:  # noqa: SIM102
            if type(tag) is int and 0 <= tag < self.tag_limit:
                return  # the rest only finds the words
        problem = checks.rank_problem(peer, self.size, name)
        if problem is None and peer == self.rank:
            problem = (
                f"expected {name} to be another rank, got this rank itself ({peer}): keep the value, do not send it"
            )
        if problem is None and (isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < self.tag_limit):
            problem = f"expected tag to be an int in 0..{self.tag_limit - 1}, got {tag!r}"
        self._check_open(operation)
        if problem:
            raise ArgumentError(f"rank {self.rank} of {self.size}: {operation}: {problem}")

    def _refuse_to_send(self, operation: str, dest: int, tag: int, problem: str) -> None:
        """Raise here, and let the receiver that waits for this message raise too instead of waiting on."""
        text = f"rank {self.rank} of {self.size}: {operation} to rank {dest}, tag {tag}: {problem}"
        self._send_message(Message(Kind.ERROR, (wire.from_bytes(text.encode()),)), dest, tag, operation)
        raise ArgumentError(text)

    # -- collective operations ---------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when every rank has called it."""
        with Agreement(self, BARRIER, differ=()):  # with a `differ` ranks compare even if checks are off
            pass

    def bcast(self, x: Tensor | None, root: int = 0) -> Tensor:
        """The tensor of rank `root`, on every rank; the other ranks' `x` is ignored and may be None.

        On `root` that is `x` itself, detached, without a copy: who changes it there changes `x`.
        """
        problem = checks.rank_problem(root, self.size, "root")
        if problem is None and self.rank == root:
            problem = checks.tensor_problem(x)
        with Agreement(self, BCAST, problem, (root,)):
            if self.rank == root:
                assert x is not None
                self._bcast_tensor(self._outgoing(x), x.is_cuda, root)
                return x.detach()
            return self._bcast_tensor(None, False, root)

    def gather(self, x: Tensor, root: int = 0) -> tuple[Tensor, ...] | None:
        """On `root`, every rank's tensor in rank order (shapes may differ, dtypes not); None on other ranks."""
        problem = checks.rank_problem(root, self.size, "root") or checks.tensor_problem(x)
        with Agreement(self, GATHER, problem, problem or (root, x.dtype), problem or x.shape) as ranks:
            if self.rank != root:
                self._exchange_pieces({root: self._outgoing(x)}, {})
                return None
            shapes = ranks.differ
            incoming = {peer: self._room(shapes[peer], x) for peer in range(self.size) if peer != root}
            self._exchange_pieces({}, incoming)
            arrived = {peer: self._arrived(part, x) for peer, part in incoming.items()}
            return tuple(arrived[peer] if peer != root else x.detach().clone() for peer in range(self.size))

    def allgather(self, x: Tensor) -> tuple[Tensor, ...]:
        """Every rank's tensor in rank order, on every rank; shapes may differ, dtypes not."""
        problem = checks.tensor_problem(x)
        with Agreement(self, ALLGATHER, problem, problem or (x.dtype,), problem or x.shape) as ranks:
            shapes = ranks.differ
            counts = [prod(shape) for shape in shapes]
            whole = self._allgather_whole(self._outgoing(x).reshape(-1), counts)
            return tuple(
                self._arrived(part.view(shape), x) for part, shape in zip(whole.split(counts), shapes, strict=True)
            )

    def scatter(self, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
        """This rank's element of the `size` tensors that `root` passes; the other ranks' `xs` is ignored.

        `root` passes a sequence of tensors of one dtype (shapes may differ), or one tensor whose first dim is
        the number of ranks.
        """
        problem = checks.rank_problem(root, self.size, "root")
        if problem is None and self.rank == root:
            problem = checks.sequence_problem(xs, self.size)
        with Agreement(self, SCATTER, problem, (root,)):
            if self.rank == root:
                assert xs is not None
                parts = [self._outgoing(x) for x in xs]
                layout = Message(Kind.TUPLE, tuple(parts), on_gpu=tuple(x.is_cuda for x in xs)).layout()
                self._bcast_bytes(wire.Header(Kind.TUPLE, 0, 0, layout).encode(), root)
                self._exchange_pieces({peer: part for peer, part in enumerate(parts) if peer != root}, {})
                return xs[root].detach().clone()
            spec = wire.Header.decode(self._bcast_bytes(None, root))[0].layout.specs[self.rank]
            mine = self._room(spec.shape, spec)
            self._exchange_pieces({}, {root: mine})
            return mine.to(self.device) if spec.on_gpu else mine

    def alltoall(self, xs: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
        """A tensor from every rank in rank order: from rank j, the element of its `xs` that is at this rank.

        `xs` holds one tensor per rank, all of one dtype; shapes may differ.
        """
        problem = checks.sequence_problem(xs, self.size)
        shapes = () if problem else tuple(tuple(x.shape) for x in xs)
        with Agreement(self, ALLTOALL, problem, problem or (xs[0].dtype,), shapes) as ranks:
            return self._swap(xs, [shapes_there[self.rank] for shapes_there in ranks.differ])

    def allreduce(self, x: Tensor, op: str = "sum", *, in_place: bool = False) -> Tensor:
        """The sum (or mean, max, min, prod) of all ranks' tensors, element by element, on every rank.

        All shapes and dtypes must be equal. With `in_place` the result overwrites `x`, which is returned.
        16-bit and 8-bit floats are accumulated in float32; a sum of bools is an `or`, as in NumPy.
        """
        problem = checks.tensor_problem(x, in_place) or reductions.problem(x.dtype, op)
        payload = None if problem else self._payload(x)
        with Agreement(self, ALLREDUCE, problem, problem or (x.dtype, x.shape, op), payload=payload) as ranks:
            if ranks.payloads is not None:
                return reductions.combine(ranks.payloads, x, op, in_place)
            return self._reduce(x, op, in_place)

    def reduce_scatter(self, xs: Sequence[Tensor] | Tensor, op: str = "sum") -> Tensor:
        """The reduction over ranks of the elements of `xs` that are at this rank.

        `xs` holds one tensor per rank, of one dtype; the shapes in it may differ, but not between ranks.
        """
        problem = checks.sequence_problem(xs, self.size) or reductions.problem(xs[0].dtype, op)
        same = () if problem else (xs[0].dtype, tuple(tuple(x.shape) for x in xs), op)
        with Agreement(self, REDUCE_SCATTER, problem, same):
            dtype = xs[0].dtype
            parts = self._swap(xs, [xs[self.rank].shape] * self.size)
            wide = [part.to(reductions.accumulator(dtype)) for part in parts]
            total = reductions.reduce_in_order(wide, reductions.accumulating_operation(dtype, op))
            return (total.div_(self.size) if op == "mean" else total).to(dtype)

    # -- models ------------------------------------------------------------------------------------------------

    def bcast_data(self, model: nn.Module) -> None:
        """Overwrite every parameter and buffer of `model` with rank 0's. Models must have the same tensors."""
        models.bcast_data(self, model)

    def multi_node_mean_grad(self, model: nn.Module, zero_fill: bool = False) -> None:
        """Replace each gradient of `model` by its mean over ranks.

        Ranks must have the same gradients; with `zero_fill` a gradient that is None counts as zeros.
        """
        models.multi_node_mean_grad(self, model, zero_fill)

    # -- for the other packages: ranks that compare before they act together ---------------------------------------

    def agreed(self, operation: str, problem: str | None = None, *, differ: Any = None, **same: Any) -> Agreement:
        """Returns a context in which all ranks are in `operation`, have compared `same`, and know each `differ`.

        It holds the watchdog's note. Operations of this communicator inside of it neither compare nor note again: all
        ranks must pass tensors of the same shapes to them.

        Args:
            operation: its name, in messages.
            problem: why this rank cannot take part, or None.
            differ: a plain value (see `plain.encode`) that may differ between ranks; with one, ranks exchange it even
                if checks are off.
            same: plain values that must be equal on all ranks; or functions that return one, called only if ranks
                compare.

        Raises:
            ArgumentError: on every rank, if one has a `problem`.
            MismatchError: on every rank, naming each rank's values and line.
        """
        values: tuple = ()
        if self.size > 1 and self.settings.checks and not problem:
            values = tuple([value() if callable(value) else value for value in same.values()])
            problem = checks.plain_problem(same, values)
        return Agreement(self, Operation(operation, tuple(same)), problem, values, differ)

    def agree(
        self, operation: str, problem: str | None = None, *, differ: Any = None, optional: bool = False, **same: Any
    ) -> list[Any]:
        """Returns every rank's `differ`, in rank order, once all ranks have compared: `agreed` without a body.

        Args:
            optional: where checks are off, nothing is exchanged, and all ranks are taken to have this `differ`.
        """
        if optional and not self.settings.checks:
            return [differ] * self.size
        with self.agreed(operation, problem, differ=differ, **same) as ranks:
            return ranks.differ

    def agreed_before(self, operation: str) -> Agreement:
        """Returns a context as `agreed` does, without a comparison: for what ranks have agreed on elsewhere.

        Such as on another communicator of the same ranks, in another thread.
        """
        return Agreement(self, Operation(operation), agreed_before=True)

    def attempt(
        self,
        operation: str,
        work: Callable[[], Result],
        *,
        root: int | None = None,
        raises: type[TorchMNError] = ArgumentError,
    ) -> list[Result]:
        """Returns what `work()` returned on every rank, in rank order; an exception on one rank raises on all.

        Always exchanges, checks on or off. `work` must not communicate; what it returns must pickle.

        Args:
            root: only this rank works; the list then holds its result alone.
            raises: what ranks raise, naming the ranks that failed; but if all ranks that worked raised the same
                `TorchMNError`, they raise their own.
        """
        return agreement.attempt(self, operation, work, root, raises)

    def exchange(
        self,
        operation: str,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, int],
        like: Tensor,
        same: Callable[[], dict[str, Any]],
    ) -> StartedExchange:
        """Starts to swap buffers of bytes with other ranks, and returns what is to be waited for.

        All ranks take part, with any peers; sizes must match at both ends. Exchanges between two ranks are matched in
        the order in which they were started.

        Args:
            operation: its name, in messages.
            outgoing: contiguous uint8 tensors by peer, which must not change any more.
            incoming: numbers of bytes by peer.
            like: a tensor on the device of the buffers.
            same: what must be equal on all ranks. It is asked only where a message of another size would end the
                process: else the receiver finds it out.
        """
        self._check_open(operation)
        self._collectives += 1  # on all ranks: the watchdog finds those that have not come by this number
        if self.dies_of_other_sizes:
            self.agree(operation, **same())
        return StartedExchange(self, operation, outgoing, incoming, like)

    def noting(self, note: int, number: int, call: str, optional: bool = False) -> Noted:
        """Returns a context whose agreements carry a `note` on behalf of another layer, such as autograd.

        Args:
            note: 0 to 3; may differ between ranks. If it does, `Noted.notes` has all ranks' afterwards.
            number: must be the same on all ranks.
            call: the number in words, for messages.
            optional: carry it only where ranks compare anyway.
        """
        return Noted(self, note, number, call, optional)
