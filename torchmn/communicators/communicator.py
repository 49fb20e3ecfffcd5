"""Communicator: a group of ranks, and everything that a user can ask of it.

What arguments are right, what ranks must agree on and what is returned is decided here, once for all transports.
`buffers` moves whole tensors, `replies` sends messages from one rank to another, `agreement` compares ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from torchmn.communicators import (
    arguments,
    models,
)
from torchmn.communicators.agreement import Agreement, Agreements, Noting, Operation, by_rank, failure_text
from torchmn.communicators.buffers import Buffers, StartedExchange
from torchmn.communicators.chainermn_hints import advice
from torchmn.communicators.launchers.topology import Topology, groups
from torchmn.communicators.messages import (
    plain_values,
    reductions,
    wire,
)
from torchmn.communicators.messages.wire import Kind, Message
from torchmn.communicators.objects import pack_each, try_pack, unpack
from torchmn.communicators.replies import Replies
from torchmn.communicators.transports.group import Settings
from torchmn.communicators.transports.transport import Traits, Transport
from torchmn.communicators.watchdog import forks  # noqa: F401
from torchmn.communicators.watchdog.waits import FINALIZE, Wait
from torchmn.compile_boundary import OPERATIONS, uncompiled_methods
from torchmn.errors import ArgumentError, TorchMNError

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
    """A group of ranks that can send to each other and act together.

    Operations on tensors return new, detached tensors (`bcast` the root's own). A wrong argument on one rank of a
    collective operation raises on every rank of it, before anything is sent. A wait longer than `timeout` ends the
    job with a table of what each rank was doing.

    Attributes:
        rank: of this process in the group.
        size: number of ranks.
        name: the same on all ranks, in messages.
        transport: moves the memory.
        group: what transport and watchdog know of this rank in the group.
        buffers: moves whole tensors once ranks have agreed; for this package.
        replies: messages from one rank to another that ask for a reply; for the other packages.
        noting: lets agreements carry notes of another layer; for the other packages.
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
        self.noting = Noting(self._agreements)
        self._topology = Topology.of(group.hosts, group.rank)
        group.watch.communicators.add(self)

    # -- what a user asks of a communicator --------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The options of this communicator."""
        return self.group.settings

    @property
    def traits(self) -> Traits:
        """What the transport can do."""
        return self.transport.traits

    @property
    def device(self) -> torch.device:
        """Where this rank computes, and where tensors that left a GPU arrive."""
        return self.group.settings.device

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each rank's host."""
        return self.group.hosts

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The number of each rank among all that were started together."""
        return self.group.world_ranks

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
        return f"<Communicator {self.name}: rank {self.rank} of {self.size}>"

    if not TYPE_CHECKING:  # a type checker would believe that every name exists

        def __getattr__(self, name: str) -> Any:
            # With the name and the object, Python itself offers the nearest name.
            message = f"'Communicator' object has no attribute {name!r}{advice(name)}"
            raise AttributeError(message, name=name, obj=self)

    def __deepcopy__(self, _: Any) -> Communicator:
        return self  # a copy of a model talks to the same ranks

    def __reduce__(self) -> Any:
        raise ArgumentError(
            f"{self!r}, and a model with it, belongs to the ranks of its job and can not be pickled. Save "
            "model.state_dict(), or torchmn.full_state_dict(model) of a parallel model, which holds global tensors"
        )

    def finalize(self) -> None:
        """Wait until everything sent has been received, then give the communicator back. Twice is fine."""
        group = self.group
        if group.closed:
            return
        self.replies.send_declined()
        if self.replies.handler is not None:
            self.replies.handler.settle()
            self.replies.handler = None
        with Wait(group, FINALIZE):
            for pending in self.transport.flush():
                with Wait(group, "finalize (a message not yet received)", pending.dest, pending.tag):
                    pending.wait()
        group.closed = True
        group.watch.pinned.discard(self)
        self.transport.close()

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks with the same `color`, ordered by `key` and then by rank, as MPI's split.

        Every rank must call it; a rank with `color=None` takes part and gets None.
        """
        problem = None
        if color is not None and not isinstance(color, int):
            problem = f"expected color to be an int or None, got {color!r}"
        elif not isinstance(key, int):
            problem = f"expected key to be an int, got {key!r}"
        # Not in inference mode: the new communicator will be used outside of it, too.
        with Agreement(self._agreements, SPLIT, problem), torch.inference_mode(False):
            choices = self.buffers.allgather_plain((color, key))
            self.group.splits += 1
            name = f"{self.name}/{self.group.splits}.{color}"
            transport = self.transport.subgroup(groups(choices), color, name)
            return None if transport is None else Communicator(transport)

    # -- point to point ----------------------------------------------------------------------------------------

    def send(self, x: Tensor | Sequence[Tensor], dest: int, tag: int = 0) -> None:
        """Send a tensor, or a tuple or list of tensors, to `dest`, without waiting for it to be received.

        The caller may change `x` as soon as this returns. Messages with the same `tag` arrive in order.
        """
        self.replies.check_peer("send", "dest", dest, tag)
        self.group.watch.pinned.add(self)
        self.replies.send(x, dest, tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        """The next message from `source` with this `tag`: a tensor, or a tuple if a tuple or list was sent."""
        self.replies.check_peer("recv", "source", source, tag)
        message = self.replies.receive(source, tag)
        if message.kind == Kind.OBJECT:
            raise TorchMNError(
                f"rank {self.rank} of {self.size}: recv from rank {source}, tag {tag}: expected tensors, got an object "
                "that was sent with send_obj: receive it with recv_obj"
            )
        if message.request:  # the sender hopes for a reply, and what this returns is detached
            self.group.watch.pinned.add(self)
            self.replies.declined.append((source, message.request))
        return message.payload()

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send any object that pickles, without waiting for it to be received."""
        self.replies.check_peer("send_obj", "dest", dest, tag)
        self.group.watch.pinned.add(self)
        data, problem = try_pack(obj)
        if data is None:
            self.replies.refuse("send_obj", dest, tag, str(problem))
        self.replies.post(Message(Kind.OBJECT, (data,)), dest, tag)

    def recv_obj(self, source: int, tag: int = 0) -> Any:
        """The next object from `source` with this `tag`."""
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
        """Return when every rank has called it."""
        with Agreement(self._agreements, BARRIER, differ=()):  # with a `differ` ranks compare even if checks are off
            pass

    def bcast(self, x: Tensor | None, root: int = 0) -> Tensor:
        """The tensor of rank `root`, on every rank; the other ranks' `x` is ignored and may be None.

        On `root` that is `x` itself, detached, without a copy: who changes it there changes `x`.
        """
        problem = arguments.rank_problem(root, self.size, "root")
        if problem is None and self.rank == root:
            problem = arguments.tensor_problem(x)
        with Agreement(self._agreements, BCAST, problem, (root,)):
            if self.rank == root:
                assert x is not None
                self.buffers.bcast_tensor(self.buffers.outgoing(x), x.is_cuda, root)
                return x.detach()
            return self.buffers.bcast_tensor(None, False, root)

    def gather(self, x: Tensor, root: int = 0) -> tuple[Tensor, ...] | None:
        """On `root`, every rank's tensor in rank order (shapes may differ, dtypes not); None on other ranks."""
        problem = arguments.rank_problem(root, self.size, "root") or arguments.tensor_problem(x)
        with Agreement(self._agreements, GATHER, problem, problem or (root, x.dtype), problem or x.shape) as ranks:
            if self.rank != root:
                self.buffers.exchange({root: self.buffers.outgoing(x)}, {})
                return None
            shapes = ranks.differ
            incoming = {peer: self.buffers.room(shapes[peer], x) for peer in range(self.size) if peer != root}
            self.buffers.exchange({}, incoming)
            arrived = {peer: self.buffers.arrived(part, x) for peer, part in incoming.items()}
            return tuple(arrived[peer] if peer != root else x.detach().clone() for peer in range(self.size))

    def allgather(self, x: Tensor) -> tuple[Tensor, ...]:
        """Every rank's tensor in rank order, on every rank; shapes may differ, dtypes not."""
        problem = arguments.tensor_problem(x)
        with Agreement(self._agreements, ALLGATHER, problem, problem or (x.dtype,), problem or x.shape) as ranks:
            shapes = ranks.differ
            counts = [prod(shape) for shape in shapes]
            whole = self.buffers.allgather_whole(self.buffers.outgoing(x).reshape(-1), counts)
            parts = self.buffers.arrived(whole, x).split(counts)
            return tuple([part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def scatter(self, xs: Sequence[Tensor] | Tensor | None, root: int = 0) -> Tensor:
        """This rank's element of the `size` tensors that `root` passes; the other ranks' `xs` is ignored.

        `root` passes a sequence of tensors of one dtype (shapes may differ), or one tensor whose first dim is
        the number of ranks.
        """
        problem = arguments.rank_problem(root, self.size, "root")
        if problem is None and self.rank == root:
            problem = arguments.sequence_problem(xs, self.size)
        with Agreement(self._agreements, SCATTER, problem, (root,)):
            if self.rank == root:
                assert xs is not None
                parts = [self.buffers.outgoing(x) for x in xs]
                layout = Message(Kind.TUPLE, tuple(parts), on_gpu=tuple(x.is_cuda for x in xs)).layout()
                self.buffers.bcast_bytes(wire.Header(Kind.TUPLE, 0, 0, layout).encode(), root)
                self.buffers.exchange({peer: part for peer, part in enumerate(parts) if peer != root}, {})
                return xs[root].detach().clone()
            spec = wire.Header.decode(self.buffers.bcast_bytes(None, root))[0].layout.specs[self.rank]
            mine = self.buffers.room(spec.shape, spec)
            self.buffers.exchange({}, {root: mine})
            return mine.to(self.device) if spec.on_gpu else mine

    def alltoall(self, xs: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
        """A tensor from every rank in rank order: from rank j, the element of its `xs` that is at this rank.

        `xs` holds one tensor per rank, all of one dtype; shapes may differ.
        """
        problem = arguments.sequence_problem(xs, self.size)
        shapes = () if problem else tuple([tuple(x.shape) for x in xs])
        with Agreement(self._agreements, ALLTOALL, problem, problem or (xs[0].dtype,), shapes) as ranks:
            return self.buffers.swap(xs, [shapes_there[self.rank] for shapes_there in ranks.differ])

    def allreduce(self, x: Tensor, op: str = "sum", *, in_place: bool = False) -> Tensor:
        """The sum (or mean, max, min, prod) of all ranks' tensors, element by element, on every rank.

        All shapes and dtypes must be equal. With `in_place` the result overwrites `x`, which is returned.
        16-bit and 8-bit floats are accumulated in float32; a sum of bools is an `or`, as in NumPy.
        """
        problem = arguments.tensor_problem(x, in_place) or reductions.problem(x.dtype, op)
        same = problem or (x.dtype, x.shape, op)
        with Agreement(self._agreements, ALLREDUCE, problem, same, payload=x) as ranks:
            if ranks.payloads is not None:
                return reductions.combine(ranks.payloads, x, op, in_place)
            return self.buffers.reduce(x, op, in_place)

    def reduce_scatter(self, xs: Sequence[Tensor] | Tensor, op: str = "sum") -> Tensor:
        """The reduction over ranks of the elements of `xs` that are at this rank.

        `xs` holds one tensor per rank, of one dtype; the shapes in it may differ, but not between ranks.
        """
        problem = arguments.sequence_problem(xs, self.size) or reductions.problem(xs[0].dtype, op)
        same = () if problem else (xs[0].dtype, tuple(tuple(x.shape) for x in xs), op)
        with Agreement(self._agreements, REDUCE_SCATTER, problem, same):
            dtype = xs[0].dtype
            parts = self.buffers.swap(xs, [xs[self.rank].shape] * self.size)
            wide = [part.to(reductions.ACCUMULATORS[dtype]) for part in parts]
            total = reductions.reduce_in_order(wide, reductions.accumulating_operation(dtype, op))
            return (total.div_(self.size) if op == "mean" else total).to(dtype)

    # -- Python objects: anything that pickles, None too, of any size --------------------------------------------

    def bcast_obj(self, obj: Any = None, root: int = 0) -> Any:
        """The object of rank `root`, on every rank."""
        problem = arguments.rank_problem(root, self.size, "root")
        data = None
        if problem is None and self.rank == root:
            data, problem = try_pack(obj)
        with self.agreed("bcast_obj", problem, root=root):
            received = self.buffers.bcast_bytes(data, root)
            return obj if self.rank == root else unpack(received, self.device)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """On `root`, the list of all ranks' objects in rank order; None on other ranks."""
        data, problem = try_pack(obj)
        problem = arguments.rank_problem(root, self.size, "root") or problem
        with self.agreed("gather_obj", problem, root=root):
            assert data is not None
            counts = self.buffers.allgather_counts(data.numel())
            if self.rank != root:
                self.buffers.exchange({root: data}, {})
                return None
            rooms = {peer: wire.room(count) for peer, count in enumerate(counts) if peer != root}
            self.buffers.exchange({}, rooms)
            return [obj if peer == root else unpack(rooms[peer], self.device) for peer in range(self.size)]

    def allgather_obj(self, obj: Any) -> list[Any]:
        """The list of all ranks' objects in rank order, on every rank."""
        return self._allgather_objects("allgather_obj", obj)

    def scatter_obj(self, objs: Sequence[Any] | None = None, root: int = 0) -> Any:
        """This rank's element of the `size` objects that `root` passes."""
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
            mine = wire.room(plain_values.decode(self.buffers.bcast_bytes(None, root))[self.rank])
            self.buffers.exchange({}, {root: mine})
            return unpack(mine, self.device)

    def allreduce_obj(self, obj: Any, op: Callable[[Any, Any], Any] | None = None) -> Any:
        """All ranks' objects joined in rank order by `op`, or by `+`, on every rank."""
        return reduce(op or add, self._allgather_objects("allreduce_obj", obj))

    def _allgather_objects(self, operation: str, obj: Any) -> list[Any]:
        data, problem = try_pack(obj)
        with self.agreed(operation, problem):
            assert data is not None
            counts = self.buffers.allgather_counts(data.numel())
            parts = self.buffers.allgather_whole(data, counts).split(counts)
            return [obj if peer == self.rank else unpack(part, self.device) for peer, part in enumerate(parts)]

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
        """Returns a context in which all ranks are in `operation`, have compared `same`, and know each `differ`.

        It holds the watchdog's note. Operations of this communicator inside of it neither compare nor note again: all
        ranks must pass tensors of the same shapes to them.

        Args:
            operation: its name, in messages.
            problem: why this rank cannot take part, or None.
            differ: a plain value (see `plain.encode`) that may differ between ranks; with one, ranks exchange it even
                if checks are off.
            compared: ranks have compared elsewhere, such as on another communicator of the same ranks, in another
                thread.
            optional: where checks are off, nothing is exchanged, and all ranks are taken to have this `differ`.
            same: plain values that must be equal on all ranks; or functions that return one, called only if ranks
                compare.

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
        """Returns every rank's `differ`, in rank order, once all ranks have compared: `agreed` without a body."""
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
        """Returns what `work()` returned on every rank, in rank order; an exception on one rank raises on all.

        Always exchanges, checks on or off. `work` must not communicate; what it returns must pickle.

        Args:
            root: only this rank works; the list then holds its result alone.
            raises: what ranks raise, naming the ranks that failed; but if all ranks that worked raised the same
                `TorchMNError`, they raise their own.
        """
        result, failure = None, None
        if root is None or self.rank == root:
            try:
                result = work()
            except Exception as error:  # whatever it is, the other ranks must raise, too
                failure = error
        mine = None if failure is None else (failure_text(failure), isinstance(failure, TorchMNError))
        with self.agreed(operation):
            failures = self.buffers.allgather_plain(mine)
            problems = {rank: problem for rank, problem in enumerate(failures) if problem is not None}
            if problems:
                (text, complete), *others = set(problems.values())
                if complete and not others and len(problems) == (self.size if root is None else 1):
                    # All that worked failed alike, with an error of ours, which needs no more words.
                    raise failure or raises(text)
                hosts = self.hosts if self.inter_size > 1 else None  # each may have files of its own
                lines = {rank: f"{operation}: {text}" for rank, (text, _) in problems.items()}
                raise raises("\n".join(by_rank(f"of {self.size}", lines, hosts))) from failure
            if root is not None:
                return [self.bcast_obj(result, root)]
            return self.allgather_obj(result)  # type: ignore[return-value]

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
        if self.group.closed:
            self.group.check_open(operation)
        self.group.collectives += 1  # on all ranks: the watchdog finds those that have not come by this number
        if not self.transport.traits.checks_sizes:
            self.agree(operation, **same())
        self.group.watch.pinned.add(self)
        return StartedExchange(self.buffers, operation, outgoing, incoming, like)


def seconds_waited(comm: Communicator) -> float:
    """Returns how long this rank has waited in communication so far, on all of its communicators."""
    return comm.group.watch.waited
