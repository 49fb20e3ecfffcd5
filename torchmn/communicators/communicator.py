"""`Communicator`, a group of ranks and the operations between them.

Argument checks, the values that ranks must agree on, and results are implemented here, once for all transports.
`buffers` moves whole tensors, `replies` sends messages from one rank to another, `agreement` compares ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torchmn.communicators import arguments, models
from torchmn.communicators.agreement import Agreement, Agreements, Operation, Piggyback, failure_text, lines_by_rank
from torchmn.communicators.background_tasks import BackgroundTasks
from torchmn.communicators.buffers import Buffers, StartedExchange
from torchmn.communicators.launchers.topology import Topology, groups
from torchmn.communicators.messages import plain_values, reductions, wire
from torchmn.communicators.messages.wire import ArrayTensor, Kind, Message
from torchmn.communicators.objects import pack_each, try_pack, unpack
from torchmn.communicators.repeated_operations import is_repeated
from torchmn.communicators.replies import Replies
from torchmn.communicators.transports.group import Settings
from torchmn.communicators.transports.transport import Traits, Transport
from torchmn.communicators.watchdog.waits import FINALIZE, Wait
from torchmn.compile_boundary import OPERATIONS, uncompiled_methods
from torchmn.errors import ArgumentError, TorchMNError
from torchmn.other_spellings import adapted, communicator_attribute

SPLIT, BARRIER = Operation("split"), Operation("barrier")
BCAST, SCATTER = Operation("bcast", ("root",)), Operation("scatter", ("root",))
GATHER = Operation("gather", ("root", "dtype"), ragged=True)
ALLGATHER = Operation("allgather", ("dtype",), ragged=True)
ALLTOALL = Operation("alltoall", ("dtype",), ragged=True)
ALLREDUCE = Operation("allreduce", ("dtype", "shape", "op"))
REDUCE_SCATTER = Operation("reduce_scatter", ("dtype", "shapes", "op"))

Result = TypeVar("Result")


@uncompiled_methods(OPERATIONS)
class Communicator:
    """A group of ranks, with point-to-point and collective operations.

    Tensors that operations return are new and detached (except that of `bcast` on the root). A wrong argument on one
    rank of a collective operation raises on every rank, before anything is sent. A wait longer than `timeout` ends the
    job with a table of what each rank was doing. Create one with `create_communicator`, `split` or `run_threads`.

    Every collective operation raises `ArgumentError` on all ranks if an argument is wrong on one of them,
    `MismatchError` on all ranks if they call different operations or pass values that differ where they must be equal,
    and `PeerError` if another rank has left.

    Args:
        transport: moves memory between ranks.

    Attributes:
        rank: number of this rank in the group.
        size: number of ranks.
        name: the same on all ranks; for messages.
        transport: moves memory between ranks.
        group: rank, hosts, counters and settings, which the transport and the watchdog share.
        buffers: moves whole tensors when ranks have agreed; for this package.
        replies: messages from one rank to another that request a reply; for the other packages.
        noting: piggybacks a number of another layer on the comparisons of ranks; for the other packages.
        background: threads of this rank that must end before the communicator is closed; for the other packages.
    """

    def __init__(self, transport: Transport):
        self.transport = transport
        self.group = group = transport.group
        self.rank = group.rank
        self.size = group.size
        self.name = group.name
        self.buffers = Buffers(transport)
        self.replies = Replies(self.buffers)
        self._agreements = Agreements(self.buffers, self.replies)
        self.noting = Piggyback(self._agreements)
        self.background = BackgroundTasks(f"rank {self.rank} of {self.size}")
        self._topology = Topology.of(group.hosts, group.rank)
        group.watch.communicators.add(self)

    # -- properties --------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The options of this communicator."""
        return self.group.settings

    @property
    def traits(self) -> Traits:
        """The abilities of the transport."""
        return self.transport.traits

    @property
    def device(self) -> torch.device:
        """Where this rank computes, and where it receives tensors that were sent from a GPU."""
        return self.group.settings.device

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host name of each rank."""
        return self.group.hosts

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """Each rank's number among all ranks that were started together."""
        return self.group.world_ranks

    @property
    def intra_rank(self) -> int:
        """Number of this rank among the communicator's ranks on this host (local rank)."""
        return self._topology.intra_rank

    @property
    def intra_size(self) -> int:
        """Number of the communicator's ranks on this host."""
        return self._topology.intra_size

    @property
    def inter_rank(self) -> int:
        """Number of this host (node rank); hosts are numbered by their smallest rank."""
        return self._topology.inter_rank

    @property
    def inter_size(self) -> int:
        """Number of hosts."""
        return self._topology.inter_size

    @property
    def max_message_bytes(self) -> int:
        """Larger buffers are sent in pieces of this size. Must be equal on all ranks."""
        return self.settings.max_message_bytes

    @max_message_bytes.setter
    def max_message_bytes(self, value: int) -> None:
        self.settings.max_message_bytes = value

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception the other ranks may never receive what was sent: do not wait for them.
        if kind is None:
            self.finalize()

    def __repr__(self) -> str:
        return f"<Communicator {self.name}: rank {self.rank} of {self.size}>"

    if not TYPE_CHECKING:  # for a type checker, every name would exist

        def __getattr__(self, name: str) -> Any:
            return communicator_attribute(self, name)

    def __deepcopy__(self, _: Any) -> Communicator:
        return self  # a copy of a model communicates with the same ranks

    def __reduce__(self) -> Any:
        raise ArgumentError(
            f"{self!r}, and a model with it, belongs to the ranks of its job and cannot be pickled. Save "
            "model.state_dict(), or torchmn.full_state_dict(model) of a parallel model, which holds global tensors"
        )

    def finalize(self) -> None:
        """Waits until everything sent has been received, and closes the communicator. Further calls do nothing.

        Waits for background tasks of this rank first, such as a checkpoint that is being written.

        Raises:
            TorchMNError: a background task has failed; the communicator is closed nevertheless.
        """
        if self.group.closed:
            return
        try:
            self.background.finish()
        finally:
            self._close()

    def _close(self) -> None:
        group = self.group
        self.replies.send_declined()
        if self.replies.handler is not None:
            self.replies.handler.drain()
            self.replies.handler = None
        with Wait(group, FINALIZE):
            for pending in self.transport.flush():
                with Wait(group, "finalize (a message not yet received)", pending.dest, pending.tag):
                    pending.wait()
        group.closed = True
        group.watch.pinned.discard(self)
        self.transport.close()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Returns a communicator of the ranks with the same `color`, as MPI_Comm_split does. Collective.

        Args:
            color: any int; None for a rank that will be in no new communicator.
            key: the new ranks are ordered by `key`, and then by rank.

        Returns:
            The new communicator, with a copy of the settings; None for `color=None`.
        """
        problem = None
        if color is not None and not isinstance(color, int):
            problem = f"expected color to be an int or None, got {color!r}"
        elif not isinstance(key, int):
            problem = f"expected key to be an int, got {key!r}"
        # Not in inference mode: the buffers of the new communicator may be used outside of it.
        with Agreement(self._agreements, SPLIT, problem), torch.inference_mode(False):
            watch = self.group.watch
            watch.pinned -= {comm for comm in tuple(watch.pinned) if _is_delivered(comm)}
            choices = self.buffers.allgather_plain((color, key))
            self.group.splits += 1
            name = f"{self.name}/{self.group.splits}.{color}"
            transport = self.transport.subgroup(groups(choices), color, name)
            return None if transport is None else Communicator(transport)

    # -- point to point ----------------------------------------------------------------------------------------

    def send(self, x: Tensor | Sequence[Tensor], dest: int, tag: int = 0) -> None:
        """Sends tensors to `dest`, without waiting for them to be received.

        Args:
            x: a tensor, or a tuple or list of tensors, of any dtype and shape. May be changed when this returns.
            dest: another rank.
            tag: messages with the same tag arrive in order.

        Raises:
            ArgumentError: an argument is wrong. If `x` cannot be sent, the receiver raises a PeerError.
        """
        self.replies.check_peer("send", "dest", dest, tag)
        self.group.watch.pinned.add(self)
        self.replies.send(x, dest, tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        """Waits for the next message from `source` with this `tag`, and returns it.

        Args:
            source: another rank.
            tag: as passed to `send`.

        Returns:
            A tensor; or a tuple of tensors, if a tuple or list was sent.

        Raises:
            ArgumentError: `source` or `tag` is wrong.
            PeerError: the sender's `send` failed, or the sender has left.
            TorchMNError: the message was sent with `send_obj`.
        """
        self.replies.check_peer("recv", "source", source, tag)
        message = self.replies.receive(source, tag)
        if message.kind == Kind.OBJECT:
            raise TorchMNError(
                f"rank {self.rank} of {self.size}: recv from rank {source}, tag {tag}: expected tensors, got an object "
                "that was sent with send_obj: receive it with recv_obj"
            )
        if message.kind >= Kind.ARRAY:
            return message.arrays()
        if message.request:  # the sender waits for a gradient, and this returns a detached tensor
            self.group.watch.pinned.add(self)
            self.replies.declined.append((source, message.request))
        return message.payload()

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object to `dest`, without waiting for it to be received.

        Args:
            obj: any object that pickles.
            dest: another rank.
            tag: messages with the same tag arrive in order.

        Raises:
            ArgumentError: an argument is wrong. If `obj` does not pickle, the receiver raises a PeerError.
        """
        self.replies.check_peer("send_obj", "dest", dest, tag)
        self.group.watch.pinned.add(self)
        data, problem = try_pack(obj)
        if data is None:
            self.replies.refuse("send_obj", dest, tag, str(problem))
        self.replies.post(Message(Kind.OBJECT, (data,)), dest, tag)

    def recv_obj(self, source: int, tag: int = 0) -> Any:
        """Waits for the next object from `source` with this `tag`, and returns it.

        Args:
            source: rank that sends.
            tag: as the sender's.

        Returns:
            The object, a copy of the sender's.

        Raises:
            ArgumentError: `source` or `tag` is wrong.
            PeerError: the sender's `send_obj` failed, or the sender has left.
            TorchMNError: the message was sent with `send`.
        """
        self.replies.check_peer("recv_obj", "source", source, tag)
        message = self.replies.receive(source, tag, "recv_obj")
        if message.kind != Kind.OBJECT:
            raise TorchMNError(
                f"rank {self.rank} of {self.size}: recv_obj from rank {source}, tag {tag}: expected an object, got "
                f"{len(message.tensors)} tensor(s) that were sent with send: receive them with recv"
            )
        return unpack(message.tensors[0], self.device)

    # -- collective operations ---------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        with Agreement(self._agreements, BARRIER, differ=()):  # with a `differ` ranks compare even if checks are off
            pass

    def bcast(self, x: Tensor | None, root: int = 0) -> Tensor:
        """Returns the tensor of rank `root`, on every rank.

        Args:
            x: the tensor, on `root`; ignored on other ranks, where it may be None.
            root: the rank whose tensor is sent.

        Returns:
            A new tensor; on `root`, `x` itself, detached and without a copy.
        """
        problem = arguments.rank_problem(root, self.size, "root")
        if problem is None and self.rank == root:
            problem = arguments.tensor_problem(x)
        with Agreement(self._agreements, BCAST, problem, (root,)):
            if self.rank == root:
                assert x is not None
                kind = Kind.ARRAY if type(x) is ArrayTensor else Kind.TENSOR
                self.buffers.bcast_tensor(self.buffers.staged(x), x.is_cuda, root, kind=kind)
                return x.detach()
            received = self.buffers.bcast_tensor(None, False, root)
            return cast("Tensor", received.numpy()) if type(received) is ArrayTensor else received

    def gather(self, x: Tensor, root: int = 0) -> tuple[Tensor, ...] | None:
        """Returns the tensors of all ranks on `root`, in rank order; None on other ranks.

        Args:
            x: this rank's tensor. Shapes may differ between ranks, dtypes may not.
            root: the rank that receives them.

        Returns:
            On `root` one tensor per rank; None elsewhere.
        """
        problem = arguments.rank_problem(root, self.size, "root") or arguments.tensor_problem(x)
        same, shape = ((), ()) if problem else ((root, x.dtype), x.shape)
        with Agreement(self._agreements, GATHER, problem, same, shape) as ranks:
            if self.rank != root:
                self.buffers.exchange({root: self.buffers.staged(x)}, {})
                return None
            shapes = ranks.differ
            incoming = {peer: self.buffers.empty(shapes[peer], x) for peer in range(self.size) if peer != root}
            self.buffers.exchange({}, incoming)
            received = {peer: self.buffers.moved_like(part, x) for peer, part in incoming.items()}
            return tuple(received[peer] if peer != root else x.detach().clone() for peer in range(self.size))

    def allgather(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors of all ranks, in rank order.

        Args:
            x: this rank's tensor. Shapes may differ between ranks, dtypes may not.

        Returns:
            One tensor per rank, the same on all ranks.
        """
        problem = arguments.tensor_problem(x)
        same, shape = ((), ()) if problem else ((x.dtype,), x.shape)
        with Agreement(self._agreements, ALLGATHER, problem, same, shape) as ranks:
            shapes = ranks.differ
            counts = [prod(shape) for shape in shapes]
            whole = self.buffers.allgather_flat(self.buffers.staged(x).reshape(-1), counts)
            parts = self.buffers.moved_like(whole, x).split(counts)
            return tuple([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def scatter(self, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
        """Returns this rank's element of the tensors that `root` passes.

        Args:
            xs: on `root`, one tensor per rank, of one dtype (shapes may differ), or a tensor whose first dim is the
                number of ranks; ignored on other ranks.
            root: the rank whose tensors are sent.

        Returns:
            A new tensor with the shape and dtype that `root` chose for this rank.
        """
        problem = arguments.rank_problem(root, self.size, "root")
        if problem is None and self.rank == root:
            problem = arguments.sequence_problem(xs, self.size)
        with Agreement(self._agreements, SCATTER, problem, (root,)):
            if self.rank == root:
                assert xs is not None
                parts = [self.buffers.staged(x) for x in xs]
                kind = Kind.ARRAYS if type(xs[0]) is ArrayTensor else Kind.TUPLE
                layout = Message(kind, tuple(parts), on_gpu=tuple(x.is_cuda for x in xs)).layout()
                self.buffers.bcast_bytes(wire.Header(kind, 0, 0, layout).encode(), root)
                self.buffers.exchange({peer: part for peer, part in enumerate(parts) if peer != root}, {})
                return xs[root].detach().clone()
            header, _ = wire.Header.decode(self.buffers.bcast_bytes(None, root))
            spec = header.layout.specs[self.rank]
            received = self.buffers.empty(spec.shape, spec)
            self.buffers.exchange({}, {root: received})
            if header.kind == Kind.ARRAYS:
                return cast("Tensor", received.numpy())
            return received.to(self.device) if spec.on_gpu else received

    def alltoall(self, xs: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
        """Returns a tensor from every rank, in rank order: from rank j, element `self.rank` of its `xs`.

        Args:
            xs: one tensor per rank, of one dtype (shapes may differ), or a tensor whose first dim is the number of
                ranks.

        Returns:
            One tensor per rank.
        """
        problem = arguments.sequence_problem(xs, self.size)
        shapes = () if problem else tuple([tuple(x.shape) for x in xs])
        with Agreement(self._agreements, ALLTOALL, problem, problem or (xs[0].dtype,), shapes) as ranks:
            return self.buffers.alltoall(xs, [peer_shapes[self.rank] for peer_shapes in ranks.differ])

    def allreduce(self, x: Tensor, op: str = "sum", *, in_place: bool = False) -> Tensor:
        """Returns the elementwise reduction of all ranks' tensors, on every rank.

        Args:
            x: this rank's tensor. Shapes and dtypes must be equal on all ranks. 16-bit and 8-bit floats are accumulated
                in float32; a sum of bools is an `or`, as in NumPy.
            op: sum, mean, max, min or prod.
            in_place: whether the result overwrites `x`, which is returned.

        Returns:
            A tensor like `x`, the same on all ranks; `x` itself with `in_place`.
        """
        problem = arguments.tensor_problem(x, in_place) or reductions.problem(x.dtype, op)
        same = problem or (x.dtype, x.shape, op)
        with Agreement(self._agreements, ALLREDUCE, problem, same, payload=x) as ranks:
            if ranks.payloads is not None:
                return reductions.combine(ranks.payloads, x, op, in_place)
            return self.buffers.reduce(x, op, in_place)

    def reduce_scatter(self, xs: Sequence[Tensor] | Tensor, op: str = "sum") -> Tensor:
        """Returns the elementwise reduction of all ranks' `xs[self.rank]`.

        Args:
            xs: one tensor per rank, of one dtype, or a tensor whose first dim is the number of ranks. Its shapes may
                differ, but must be the same on all ranks.
            op: sum, mean, max, min or prod.

        Returns:
            A tensor like `xs[self.rank]`.
        """
        problem = arguments.sequence_problem(xs, self.size) or reductions.problem(xs[0].dtype, op)
        same = () if problem else (xs[0].dtype, tuple(tuple(x.shape) for x in xs), op)
        with Agreement(self._agreements, REDUCE_SCATTER, problem, same):
            dtype = xs[0].dtype
            parts = self.buffers.alltoall(xs, [xs[self.rank].shape] * self.size)
            wide = [part.to(reductions.ACCUMULATORS[dtype]) for part in parts]
            total = reductions.reduce_in_order(wide, reductions.accumulating_operation(dtype, op))
            return (total.div_(self.size) if op == "mean" else total).to(dtype)

    # -- Python objects: anything that pickles, of any size --------------------------------------------------------

    def bcast_obj(self, obj: Any = None, root: int = 0) -> Any:
        """Returns the object of rank `root`, on every rank; `obj` of other ranks is ignored."""
        problem = arguments.rank_problem(root, self.size, "root")
        data = None
        if problem is None and self.rank == root:
            data, problem = try_pack(obj)
        with self.agreed("bcast_obj", problem, root=root):
            received = self.buffers.bcast_bytes(data, root)
            return obj if self.rank == root else unpack(received, self.device)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Returns the list of all ranks' objects on `root`, in rank order; None on other ranks."""
        data, problem = try_pack(obj)
        problem = arguments.rank_problem(root, self.size, "root") or problem
        with self.agreed("gather_obj", problem, root=root):
            assert data is not None
            counts = self.buffers.allgather_counts(data.numel())
            if self.rank != root:
                self.buffers.exchange({root: data}, {})
                return None
            received = {peer: wire.empty_bytes(count) for peer, count in enumerate(counts) if peer != root}
            self.buffers.exchange({}, received)
            return [obj if peer == root else unpack(received[peer], self.device) for peer in range(self.size)]

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Returns the list of all ranks' objects, in rank order."""
        return self._allgather_objects("allgather_obj", obj)

    def scatter_obj(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """Returns this rank's element of the objects that `root` passes.

        Args:
            objs: on `root`, a list or tuple with one object per rank; ignored on other ranks.
            root: the rank whose objects are sent.

        Returns:
            The object, a copy of root's.
        """
        problem = arguments.rank_problem(root, self.size, "root")
        parts: list[Tensor] = []
        if problem is None and self.rank == root:
            parts, problem = pack_each(objs, self.size)
        with self.agreed("scatter_obj", problem, root=root):
            if self.rank == root:
                assert objs is not None
                self.buffers.bcast_bytes(plain_values.encode([part.numel() for part in parts]), root)
                self.buffers.exchange({peer: part for peer, part in enumerate(parts) if peer != root}, {})
                return objs[root]
            received = wire.empty_bytes(plain_values.decode(self.buffers.bcast_bytes(None, root))[self.rank])
            self.buffers.exchange({}, {root: received})
            return unpack(received, self.device)

    def allreduce_obj(self, obj: Any, op: Callable[[Any, Any], Any] | None = None) -> Any:
        """Returns all ranks' objects combined in rank order by `op(left, right)`, or by `+`, on every rank."""
        return reduce(op or add, self._allgather_objects("allreduce_obj", obj))

    def _allgather_objects(self, operation: str, obj: Any) -> list[Any]:
        data, problem = try_pack(obj)
        with self.agreed(operation, problem):
            assert data is not None
            counts = self.buffers.allgather_counts(data.numel())
            parts = self.buffers.allgather_flat(data, counts).split(counts)
            return [obj if peer == self.rank else unpack(part, self.device) for peer, part in enumerate(parts)]

    # -- models ------------------------------------------------------------------------------------------------

    def bcast_data(self, model: nn.Module) -> None:
        """Overwrites every parameter and buffer of `model` with rank 0's.

        Args:
            model: a module; the same on all ranks except for its values.

        Raises:
            ArgumentError: on every rank, if a parameter is lazy or cannot be sent.
            MismatchError: on every rank, if names, dtypes or shapes of the tensors differ between ranks.
        """
        models.bcast_data(self, model)

    def multi_node_mean_grad(self, model: nn.Module, zero_fill: bool = False) -> None:
        """Replaces each gradient of `model` by its mean over ranks.

        Args:
            model: the same on all ranks.
            zero_fill: whether a gradient that is None counts as zeros; else such parameters are left out.

        Raises:
            ArgumentError: on every rank, if a gradient is sparse or cannot be sent.
            MismatchError: on every rank, if ranks have gradients of different parameters.
        """
        models.multi_node_mean_grad(self, model, zero_fill)

    # -- for the other packages: comparing ranks before they communicate -------------------------------------------

    def agreed(
        self,
        operation: str,
        problem: str | None = None,
        *,
        differ: Any = None,
        compared: bool = False,
        optional: bool = False,
        **same: Any,
    ) -> Agreement:
        """Returns a context in which all ranks are in `operation`, have compared `same` and exchanged `differ`.

        It is registered with the watchdog. Operations of this communicator inside of it neither compare nor register
        again: all ranks must pass tensors of the same shapes to them.

        Args:
            operation: its name, for messages.
            problem: why this rank cannot take part, or None.
            differ: a plain value (see `plain_values.encode`) that may differ between ranks. Ranks exchange it even if
                checks are off.
            compared: whether ranks have compared already, such as on another communicator of the same ranks.
            optional: whether nothing is exchanged if checks are off; all ranks are then assumed to have this `differ`.
            same: plain values that must be equal on all ranks, or functions that return one, called only if ranks
                compare.

        Returns:
            A context manager, whose `differ` is the list of all ranks' values.

        Raises:
            ArgumentError: on every rank, if one has a `problem`.
            MismatchError: on every rank, naming each rank's values and line.
        """
        compared_names = Operation(operation, tuple(same), lazy=True)
        values = tuple(same.values())
        return Agreement(self._agreements, compared_names, problem, values, differ, None, compared, optional)

    def agree(
        self, operation: str, problem: str | None = None, *, differ: Any = None, optional: bool = False, **same: Any
    ) -> list[Any]:
        """Returns every rank's `differ`, in rank order, when all ranks have compared: `agreed` without a body."""
        with self.agreed(operation, problem, differ=differ, optional=optional, **same) as ranks:
            return ranks.differ

    def attempt(
        self,
        operation: str,
        work: Callable[[], Result],
        *,
        root: int | None = None,
        raises: type[TorchMNError] = ArgumentError,
    ) -> list[Result]:
        """Returns the results of `work()` on all ranks, in rank order; an exception on one rank raises on all.

        Exchanges results even if checks are off.

        Args:
            operation: its name, for messages.
            work: must not communicate; its result must pickle.
            root: the only rank that calls `work`; the list then has its result only. None: all ranks.
            raises: the exception that ranks raise, naming the ranks that failed. But if `work` raised the same
                `TorchMNError` wherever it was called, that one is raised.

        Returns:
            One result per rank, or with `root` that of one rank.
        """
        result: Any = None
        failure: Exception | None = None
        if root is None or self.rank == root:
            try:
                result = work()
            except Exception as error:  # of any type: the other ranks must raise, too
                failure = error
        outcome = None if failure is None else (failure_text(failure), isinstance(failure, TorchMNError))
        with self.agreed(operation):
            outcomes = self.buffers.allgather_plain(outcome)
            failures = {rank: each for rank, each in enumerate(outcomes) if each is not None}
            if failures:
                (text, is_ours), *different = set(failures.values())
                if is_ours and not different and len(failures) == (self.size if root is None else 1):
                    raise failure or raises(text)  # the message of a TorchMNError is complete
                hosts = self.hosts if self.inter_size > 1 else None  # files may differ between hosts
                texts = {rank: f"{operation}: {text}" for rank, (text, _) in failures.items()}
                raise raises("\n".join(lines_by_rank(f"of {self.size}", texts, hosts))) from failure
            return self.allgather_obj(result) if root is None else [self.bcast_obj(result, root)]

    def bcast_into(self, x: Tensor, root: int) -> None:
        """Overwrites a contiguous tensor on the host with that of `root`, inside `agreed`.

        One message without a header: all ranks know shape and dtype.
        """
        self.buffers.bcast_flat(x.view(-1), root)

    def exchange(
        self,
        operation: str,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, int],
        like: Tensor,
        same: Callable[[], dict[str, Any]],
        key: bytes | None = None,
    ) -> StartedExchange:
        """Starts an exchange of byte buffers with other ranks, and returns it.

        All ranks must call, with any peers. Exchanges between two ranks are matched in the order in which they were
        started.

        Args:
            operation: its name, for messages.
            outgoing: contiguous uint8 tensors by peer, which must not change any more.
            incoming: numbers of bytes by peer, as the peer sends them.
            like: a tensor on the device of the buffers.
            same: returns values that must be equal on all ranks. Ranks compare them only if a message of another size
                would crash the transport; otherwise the receiver detects it.
            key: identifies these values. A parallel model compares them in its first forward only.

        Returns:
            The exchange, whose `received()` waits for the buffers.
        """
        if self.group.closed:
            self.group.check_open(operation)
        self.group.collectives += 1  # on all ranks: by this number the watchdog finds ranks that are behind
        if not self.transport.traits.checks_sizes and (key is None or not is_repeated(self, key)):
            self.agree(operation, **same())
        self.group.watch.pinned.add(self)
        return StartedExchange(self.buffers, operation, outgoing, incoming, like)


def as_communicator(given: object, operation: str, advice: str = "") -> Communicator:
    """Returns `given`, or the communicator for one of another library, such as mpi4py's.

    Args:
        given: the argument called `comm` of `operation`.
        operation: its name, for the message.
        advice: the end of the message.

    Returns:
        A communicator of this library.

    Raises:
        ArgumentError: it is neither.
    """
    if isinstance(given, Communicator):
        return given
    comm = adapted(given)
    if comm is None:
        text = f"{operation}: expected comm to be a communicator, got {arguments.describe(given)}"
        raise ArgumentError(text + advice)
    return comm


def seconds_waited(comm: Communicator) -> float:
    """Returns how many seconds this rank has spent in communication so far, on all of its communicators."""
    return comm.group.watch.waited


def _is_delivered(comm: Communicator) -> bool:
    """Returns whether other ranks need nothing more from this communicator: it may be dropped."""
    replies = comm.replies
    return replies.handler is None and not replies.declined and not comm.transport.undelivered()
