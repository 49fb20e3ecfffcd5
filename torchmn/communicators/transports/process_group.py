"""The torch.distributed transport: gloo for host memory and, if requested, nccl for GPU memory.

Backends are created and used directly, not through torch.distributed's default group: a user's `init_process_group` and
DDP are not affected, ranks are those of the communicator, and a split needs only its members. All messages between two
ranks travel in one ordered stream, with the tag in the header, and a message with another tag than the awaited one is
kept in a mailbox. (nccl has no tags, and gloo cannot receive a message of unknown size.)
"""

from __future__ import annotations

import os
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchmn._torch_compat import end_coalescing, start_coalescing
from torchmn.communicators.launchers.environment import Launch
from torchmn.communicators.launchers.topology import Machine, names_of_hosts
from torchmn.communicators.messages import reductions, wire
from torchmn.communicators.messages.wire import Header, Kind, Layout, Message, TensorSpec
from torchmn.communicators.transports import gloo
from torchmn.communicators.transports.group import Group, Settings
from torchmn.communicators.transports.rendezvous import open_store_between
from torchmn.communicators.transports.transport import Carrier, Exchange, PeerBuffers, Pending, Traits
from torchmn.communicators.watchdog.process_hooks import time_limit
from torchmn.communicators.watchdog.waits import Watch
from torchmn.errors import LaunchError, PeerError

HEADER_BYTES = 4096
_CONNECT_SECONDS = 10  # for gloo to report that it does not connect, before the process is ended without an explanation
_STREAM, _PAYLOAD, _EXCHANGE = 1, 2, 3  # gloo's tags
_OPERATIONS = {
    "sum": dist.ReduceOp(dist.ReduceOp.SUM),
    "max": dist.ReduceOp(dist.ReduceOp.MAX),
    "min": dist.ReduceOp(dist.ReduceOp.MIN),
    "prod": dist.ReduceOp(dist.ReduceOp.PRODUCT),
}
_REDUCIBLE = {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}


def _gloo_message(error: RuntimeError) -> str:
    """Returns gloo's error message without its source line and its advice."""
    return str(error).partition("] ")[2].partition(". This is")[0] or str(error)


def _lost_message(dest: int, tag: int, error: RuntimeError) -> PeerError:
    return PeerError(f"rank {dest} ended before it received a message, tag {tag} ({_gloo_message(error)})")


class _PendingSends:
    """Sends in flight, whose buffers must live until they are complete.

    gloo reports a complete send only to a thread that waits for it. This class starts such a thread with the first
    send.
    """

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[int, int, Any, Any] | None] = queue.Queue()
        self.pending: deque[tuple[int, int]] = deque()  # (dest, tag), in order
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def add(self, dest: int, tag: int, works: list[Any], buffers: Any) -> None:
        if self._failure is not None:
            raise self._failure
        self.pending.append((dest, tag))
        self._queue.put((dest, tag, works, buffers))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchmn-sends", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            sent = self._queue.get()
            if sent is None:
                return
            dest, tag, works, buffers = sent
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._failure = _lost_message(dest, tag, error)
            del sent, works, buffers
            self.pending.popleft()
            self._queue.task_done()

    def close(self) -> None:
        """Ends the thread. If it were still in torch when Python ends, the process would crash."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Returns when everything has been received."""
        self._queue.join()
        if self._failure is not None:
            raise self._failure


@dataclass
class _Undelivered:
    """Messages that have not been received, the first of them to `dest`."""

    dest: int
    tag: int | None
    sends: _PendingSends

    def wait(self) -> None:
        self.sends.finish()


class ProcessGroupTransport:
    """One rank's connections to the other ranks of its group, started by torchrun or `torchmn run --transport gloo`."""

    def __init__(self, group: Group, rendezvous: gloo.Rendezvous, use_nccl: bool):
        self.group = group
        name = "nccl" if use_nccl else "gloo"
        self.traits = Traits(name, reads_gpu_memory=use_nccl, sees_arrivals=False, checks_sizes=False)
        self.carrier: Carrier | None = None
        self._rank, self._size = group.rank, group.size
        self._rendezvous = rendezvous
        timeout = timedelta(seconds=2 * group.settings.timeout + 600)  # must exceed the watchdog's timeout
        self._gloo: Any = gloo.connect(rendezvous, group.name, group.rank, group.size, timeout)
        # A rank that drops its communicator at once would close connections that others are still making.
        self._gloo.barrier().wait()
        store = dist.PrefixStore(f"{group.name}/nccl", rendezvous.store)
        self._nccl: Any = _nccl(store, group.rank, group.size) if use_nccl else None
        self._one_way: dict[tuple[int, int], Any] = {}  # nccl groups of two, by (source, dest)
        self._sends = _PendingSends()
        self._mailboxes: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
        # Several threads may send and receive at once, but only one of them may write to a stream, or read from it.
        self._writing = threading.Lock()
        self._reading: set[int] = set()  # sources
        self._mailbox_changed = threading.Condition()
        self._numbers = torch.zeros(2, dtype=torch.int64, device="cpu")

    # -- point to point ----------------------------------------------------------------------------------------

    def post(self, message: Message, dest: int, tag: int) -> Pending | None:
        header = Header(message.kind, message.request, tag, message.layout())
        encoded = wire.from_bytes(header.encode())
        tensors = [x if message.private else x.clone() for x in message.tensors]
        block = wire.empty_bytes(HEADER_BYTES)
        works, follow = [], tensors
        if encoded.numel() > HEADER_BYTES:
            length = Layout.of((TensorSpec(torch.uint8, (encoded.numel(),)),))
            follow = [encoded, *tensors]
            encoded = wire.from_bytes(Header(Kind.LONG, message.request, tag, length).encode())
        elif encoded.numel() + header.layout.nbytes <= HEADER_BYTES and not message.on_gpu:
            encoded = torch.cat([encoded, *(wire.as_bytes(x) for x in tensors)])
            follow = []
        block[: encoded.numel()] = encoded
        with self._writing:
            try:
                works.append(self._gloo.send([block], dest, _STREAM))
                for piece in self._pieces(follow):
                    group, peer = self._route(piece, self._rank, dest)
                    works.append(group.send([piece], peer, _PAYLOAD))
            except RuntimeError as error:
                raise _lost_message(dest, tag, error) from None
            self._sends.add(dest, tag, works, (block, follow))
        return None

    def take(self, source: int, tag: int) -> Message:
        boxes, changed = self._mailboxes, self._mailbox_changed
        while True:
            with changed:
                changed.wait_for(lambda: boxes.get((source, tag)) or source not in self._reading)
                box = boxes.get((source, tag))
                if box:
                    message = box.popleft()
                    if not box:
                        del boxes[source, tag]  # tags that never repeat must not fill the memory
                    return message
                self._reading.add(source)
            try:
                arrived_tag, message = self._next_message(source)
                with changed:
                    boxes[source, arrived_tag].append(message)
            finally:
                with changed:
                    self._reading.discard(source)
                    changed.notify_all()

    def arrived(self, source: int, tag: int) -> bool:
        return bool(self._mailboxes.get((source, tag)))

    def _next_message(self, source: int) -> tuple[int, Message]:
        """Returns the tag and the next message of the stream from `source`."""
        block = wire.empty_bytes(HEADER_BYTES)
        self._run(self._gloo.recv, [block], source, _STREAM)
        data = wire.to_bytes(block)
        header, start = Header.decode(data)
        if header.kind == Kind.LONG:
            long = header.layout.specs[0].empty()
            self._receive([long], source)
            header, _ = Header.decode(wire.to_bytes(long))
            start = HEADER_BYTES
        if start + header.layout.nbytes <= HEADER_BYTES and not header.layout.on_gpu:
            return header.number, header.message_in(data, start)
        gpu = self.group.settings.device if self.traits.reads_gpu_memory else None
        tensors = [spec.empty(gpu) for spec in header.layout.specs]
        self._receive(tensors, source)
        return header.number, header.message(tensors)

    def _receive(self, tensors: Sequence[Tensor], source: int) -> None:
        for piece in self._pieces(tensors):
            group, peer = self._route(piece, source, self._rank)
            self._run(group.recv, [piece], peer, _PAYLOAD)

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        limit = self.group.settings.max_message_bytes
        return [piece for x in tensors if x.numel() for piece in wire.pieces(wire.as_bytes(x), limit)]

    def _route(self, piece: Tensor, source: int, dest: int) -> tuple[Any, int]:
        """Returns the backend for a payload, and the peer's rank in it.

        nccl needs one group per direction: sends and receives of one group share a stream, in which two ranks that both
        send first would wait for each other.
        """
        peer = dest if source == self._rank else source
        if not piece.is_cuda:
            return self._gloo, peer
        if (source, dest) not in self._one_way:
            store = dist.PrefixStore(f"{self.group.name}/{source}to{dest}", self._rendezvous.store)
            self._one_way[source, dest] = _nccl(store, 0 if self._rank == source else 1, 2)
        return self._one_way[source, dest], 1 if self._rank == source else 0

    def undelivered(self) -> list[int]:
        return [dest for dest, _ in tuple(self._sends.pending)]

    def flush(self) -> Iterator[Pending]:
        for dest, tag in tuple(self._sends.pending)[:1]:
            yield _Undelivered(dest, tag, self._sends)
        self._sends.finish()  # raises if a message was lost before

    # -- collective operations ---------------------------------------------------------------------------------

    def _run(self, start: Callable[..., Any], *arguments: Any) -> None:
        """Starts a backend's work and waits for it; a broken connection means that another rank has ended."""
        try:
            # If the connection is broken already, gloo raises in `start`.
            start(*arguments).wait()
        except RuntimeError as error:
            raise self.disconnected(error) from None

    def disconnected(self, error: RuntimeError) -> PeerError:
        wait = self.group.watch.longest()
        operation = wait.operation if wait else "an operation"
        return PeerError(
            f"rank {self._rank} of {self._size}: {operation}: lost the connection to another rank, "
            f"which ended or was killed ({_gloo_message(error)})"
        )

    def _backend(self, x: Tensor) -> Any:
        return self._nccl if x.is_cuda else self._gloo

    def exchange(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Exchange:
        on_gpu = any(x.is_cuda for x in (*outgoing.values(), *incoming.values()))
        if on_gpu:  # nccl: as one group call, or two ranks that both send first would wait for each other
            start_coalescing(self._nccl, self.group.settings.device)
        group = self._nccl if on_gpu else self._gloo
        try:
            works = [group.recv([wire.as_bytes(x)], peer, _EXCHANGE) for peer, x in incoming.items()]
            works += [group.send([wire.as_bytes(x)], peer, _EXCHANGE) for peer, x in outgoing.items()]
        except RuntimeError as error:
            raise self.disconnected(error) from None
        if on_gpu:
            works = [end_coalescing(self._nccl, self.group.settings.device)]
        return _Works(self, works, (outgoing, incoming))

    def equal(self, number: int) -> bool:
        self._numbers[0], self._numbers[1] = number, -number
        self.allreduce_(self._numbers, self._numbers, "max", 1.0)
        highest, lowest = self._numbers.tolist()
        return highest == -lowest

    def bcast_(self, flat: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._run(self._backend(flat).broadcast, [wire.as_bytes(flat)], options)

    def allreduce_(self, source: Tensor, out: Tensor, op: str, scale: float) -> bool:
        if out.dtype not in _REDUCIBLE or reductions.may_lose_nan(out.dtype, op):
            return False
        if source is not out:
            out.copy_(source)
        options = dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[op]
        self._run(self._backend(out).allreduce, [out], options)
        reductions.scale_(out, scale)
        return True

    def allgather_(self, flat: Tensor, whole: Tensor, counts: Sequence[int]) -> None:
        parts = [wire.as_bytes(part) for part in whole.split(list(counts))]
        if len(set(counts)) == 1:
            if flat.numel():
                self._run(self._backend(flat).allgather, [parts], [wire.as_bytes(flat)])
            return
        parts[self._rank].copy_(wire.as_bytes(flat))
        others = [peer for peer in range(self._size) if peer != self._rank]
        outgoing = dict.fromkeys(others, flat) if flat.numel() else {}
        self.exchange(outgoing, {peer: parts[peer] for peer in others if counts[peer]}).wait()

    def subgroup(
        self, members_of: Mapping[int, list[int]], color: int | None, name: str
    ) -> ProcessGroupTransport | None:
        if color is None:
            return None
        group = self.group.among(members_of[color], name)
        return ProcessGroupTransport(group, self._rendezvous, self._nccl is not None)

    def close(self) -> None:
        # The backends' threads must end before Python does.
        self._sends.close()
        self._gloo = self._nccl = None
        self._one_way.clear()


class _Works:
    """An exchange in flight, with the buffers that it reads and writes."""

    def __init__(self, transport: ProcessGroupTransport, works: list[Any], buffers: Any):
        self._transport = transport
        self._works = works
        self._kept = buffers

    def wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._transport.disconnected(error) from None

    def wait_received(self) -> None:
        self.wait()


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    backends: Any = dist  # torch's builds for CPUs do not have nccl
    return backends.ProcessGroupNCCL(store, rank, size, backends.ProcessGroupNCCL.Options())


def create(
    backend: str, settings: Settings, launch: Launch, name: str, mpi_comm: Any = None
) -> tuple[ProcessGroupTransport, str]:
    """Returns the transport of all ranks that the launcher started, and the address at which they found each other.

    Args:
        backend: gloo or nccl.
        settings: of the communicator.
        launch: what the launcher's environment variables contain.
        name: of the communicator.
        mpi_comm: an mpi4py communicator over which ranks agree on an address; None: by the launcher's variables.

    Raises:
        LaunchError: the ranks do not find each other, or another process has this rank.
    """
    rank, size = launch.rank, launch.size
    assert size is not None
    use_nccl = backend == "nccl"
    if use_nccl:
        torch.cuda.set_device((launch.local_rank or 0) % torch.cuda.device_count())
    store, master, is_closed = _store(settings, launch, mpi_comm)
    store = dist.PrefixStore(f"torchmn/{name}", store)
    if store.add(f"claimed/{rank}", 1) != 1:  # this process would read the keys of the first one
        raise LaunchError(
            f"rank {rank} of {size}: another process has created {name!r} as this rank of the job already. A program "
            "that a rank starts is no rank: start it with its own `torchmn run` or another launcher"
        )
    with time_limit(2 * settings.timeout + _CONNECT_SECONDS):  # that of the store, and that of gloo
        machines = gloo.allgather_by_store(store, "machine", Machine.here(), rank, size)
        hosts = names_of_hosts([Machine(*machine) for machine in machines])
        group = Group.of_world(name, hosts, Watch(rank, hosts[rank]), settings)
        address = gloo.listen_address(store, rank, size, master)
        secret = gloo.shared_secret(store, rank) if is_closed else None
        try:
            return ProcessGroupTransport(group, gloo.Rendezvous(store, address, secret), use_nccl), master
        except RuntimeError as error:
            raise LaunchError(
                f"rank {rank} of {size} on {hosts[rank]}: gloo does not connect the ranks: {_gloo_message(error)}. A "
                "firewall, or the wrong network? GLOO_SOCKET_IFNAME=eth0, on every host, names the right interface."
            ) from error


def _store(settings: Settings, launch: Launch, mpi_comm: Any) -> tuple[Any, str, bool]:
    """Returns the store over which ranks connect, the address of its server, and whether it needs a secret."""
    rank, size = launch.rank, launch.size
    assert size is not None
    timeout = timedelta(seconds=settings.timeout)
    try:
        if mpi_comm is None:
            store, is_closed = gloo.open_store(launch, timeout)
            return store, os.environ["MASTER_ADDR"], is_closed
        with time_limit(settings.timeout):
            store, master = open_store_between(rank, size, mpi_comm.bcast, mpi_comm.allgather, "create_communicator")
        store.set_timeout(timeout)
        return store, master, False
    except LaunchError:
        raise
    except Exception as error:
        raise LaunchError(
            f"rank {rank} of {size}: the ranks do not find each other at MASTER_ADDR:MASTER_PORT: {error}. "
            "Check that rank 0's host and port can be reached from here; `torchmn doctor` helps."
        ) from error


def end_nothing(status: int) -> None:
    """Does nothing: torch.distributed cannot end other processes. Their watchdogs and the launcher do."""
