"""Several threads of one rank: collective operations of a communicator belong to one of them, messages to all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchmn
from tests._worlds import ranks
from torchmn import Communicator
from torchmn import functions as F
from torchmn.errors import PeerError, ThreadError

EVERYWHERE = ("threads", "mpi", "openmpi", "gloo")


class Worker(threading.Thread):
    """A thread whose exception is raised where its result is asked for."""

    def __init__(self, work: Callable[..., Any], *args: Any):
        super().__init__(name="worker")
        self._work, self._args = work, args
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._work(*self._args)
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join()
        if self._error is not None:
            raise self._error
        return self._value


def wait_until_broken(comm: Communicator) -> None:
    """The news takes another way than messages do. The test's own timeout ends a wait in vain."""
    while comm.name not in comm.group.watch.broken:
        threading.Event().wait(0.01)


def numbers_of(comm: Communicator, start: int) -> int:
    """How many results of some hundred operations are right, of all ways that a sum can take."""
    peer, source, right = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, 0
    for step in range(start, start + 40):
        value = float(step)
        for length in (3, 3000, 60_000, 300_000 if step % 20 == 0 else 1):  # carried, by MPI, by shared memory
            right += bool((comm.allreduce(torch.full((length,), value)) == comm.size * value).all())
        root = step % comm.size
        right += bool((comm.bcast(torch.full((700,), value) if comm.rank == root else None, root) == value).all())
        parts = comm.allgather(torch.full((2 + comm.rank,), value))
        right += [part.tolist() for part in parts] == [[value] * (2 + rank) for rank in range(comm.size)]
        right += comm.allgather_obj((step, comm.rank)) == [(step, rank) for rank in range(comm.size)]
        right += comm.bcast_obj((step, "x" * 3000), root) == (step, "x" * 3000)
        right += comm.reduce_scatter([torch.full((4,), value)] * comm.size).tolist() == [value * comm.size] * 4
        for length in (10, 30_000):
            comm.send(torch.full((length,), value), peer, tag=3)
            right += bool((comm.recv(source, tag=3) == value).all())
    return right


@ranks(2, 3, on=EVERYWHERE, timeout=120)
def test_two_threads_with_a_communicator_each_get_their_own_numbers(comm):
    own = comm.split(0, comm.rank)
    worker = Worker(numbers_of, own, 1000)
    assert numbers_of(comm, 0) == 40 * 11
    assert worker.result() == 40 * 11


@ranks(2, 3)
def test_a_second_thread_raises_and_nobody_can_go_on(comm):
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(ThreadError) as caught:
            Worker(comm.allreduce, torch.ones(3)).result()
        message = str(caught.value)
        assert message.startswith(f"rank 0 of {comm.size}: allreduce of communicator {comm.name!r} in thread 'worker'")
        assert f"expected thread {threading.current_thread().name!r}" in message
        assert "own = comm.split(0, comm.rank)" in message
        with pytest.raises(ThreadError, match=r"barrier: communicator .* two threads of a rank used it: rank 0 of"):
            comm.barrier()
    else:
        wait_until_broken(comm)
        with pytest.raises(PeerError, match=f"rank {comm.rank} of .*: allreduce: .* in thread 'worker', at .*test_thr"):
            comm.allreduce(torch.ones(3))
    # Messages, and other communicators of the same ranks, are as good as before.
    comm.send(torch.full((3,), 1.0 + comm.rank), (comm.rank + 1) % comm.size)
    assert comm.recv((comm.rank - 1) % comm.size)[0] == 1.0 + (comm.rank - 1) % comm.size


COLLECTIVES: dict[str, Callable[[Communicator], Any]] = {
    "barrier": lambda comm: comm.barrier(),
    "allgather_obj": lambda comm: comm.allgather_obj(1),
    "bcast_obj": lambda comm: comm.bcast_obj(1),
    "split": lambda comm: comm.split(0),
    "F.allreduce": lambda comm: F.allreduce(comm, torch.ones(2, requires_grad=True)),
    "ProcessGrid": lambda comm: torchmn.ProcessGrid(comm, data=comm.size),
    "optimizer": lambda comm: torchmn.create_multi_node_optimizer(torch.optim.SGD([torch.ones(1)], lr=1.0), comm),
    "scatter_dataset": lambda comm: torchmn.scatter_dataset([1, 2, 3], comm),
    "iterator": lambda comm: torchmn.iterators.create_multi_node_iterator([1, 2], comm),
}


@ranks(2, on="threads")
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("checks", [True, False])
def test_every_collective_operation_checks_its_owner(comm, name, checks):
    comm.barrier()
    comm.settings.checks = checks
    with pytest.raises((ThreadError, PeerError)):  # whichever rank is faster
        Worker(COLLECTIVES[name], comm).result()


@ranks(2)
def test_a_thread_of_one_rank_may_step_an_optimizer_only_if_its_communicator_is_its_own(comm):
    model = torch.nn.Linear(2, 1)
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    model(torch.ones(1, 2)).sum().backward()
    if comm.rank == 0:
        with pytest.raises(ThreadError, match="in thread 'worker'"):
            Worker(optimizer.step).result()
    else:
        wait_until_broken(comm)
        with pytest.raises(PeerError, match="in thread 'worker'"):
            optimizer.step()


@ranks(2)
def test_a_thread_continues_after_another_has_ended(comm):
    for n in range(5):
        total = Worker(comm.allreduce, torch.full((3,), float(n))).result()
        assert total.tolist() == [float(n) * comm.size] * 3
    assert comm.allreduce(torch.ones(2)).tolist() == [comm.size] * 2  # and this thread becomes the owner
    if comm.rank == 0:
        with pytest.raises(ThreadError):
            Worker(comm.barrier).result()


@ranks(2)
def test_threads_of_a_rank_send_and_receive_while_another_sums(comm):
    peer, steps = 1 - comm.rank, 100

    def exchange(tag: int) -> list[float]:
        received = []
        for step in range(steps):
            comm.send(torch.full((20,), float(1000 * tag + step)), peer, tag)
            received.append(comm.recv(peer, tag)[0].item())
            comm.send_obj((tag, step), peer, tag)
            assert comm.recv_obj(peer, tag) == (tag, step)
        return received

    workers = [Worker(exchange, tag) for tag in (1, 2)]
    sums = [comm.allreduce(torch.full((5,), float(step)))[0].item() for step in range(steps)]
    assert sums == [2.0 * step for step in range(steps)]
    for tag, worker in zip((1, 2), workers, strict=True):
        assert worker.result() == [1000.0 * tag + step for step in range(steps)]


@ranks(2)
def test_a_thread_that_only_finalizes_is_no_second_thread(comm):
    own = comm.split(0, comm.rank)
    own.barrier()
    Worker(own.finalize).result()
    with pytest.raises(torchmn.TorchMNError, match="barrier"):
        own.barrier()


class Deep(torch.autograd.Function):
    """Runs backward in backward, so often that autograd continues in another thread, as it does for GPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, work: Callable[[], None]) -> Tensor:
        ctx.depth, ctx.work = depth, work
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.depth == 0:
            ctx.work()
            return gradient, None, None
        with torch.enable_grad():
            x = gradient.detach().requires_grad_()
            y = Deep.apply(x, ctx.depth - 1, ctx.work)
            (y * 1).sum().backward()
        return gradient, None, None


@ranks(2)
def test_a_thread_of_autograd_acts_for_the_thread_that_called_backward(comm):
    seen: list[Any] = []

    def work() -> None:
        seen.append(threading.current_thread())
        seen.append(comm.allreduce(torch.full((3,), 1.0 + comm.rank)).tolist())

    comm.barrier()
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        Deep.apply(x, 70, work).sum().backward()
    assert seen[1] == seen[3] == [3.0] * 3
    assert seen[0] is not threading.current_thread()
    comm.barrier()  # and the owner has not changed


@ranks(2)
def test_a_backward_of_collective_operations_belongs_to_its_owner_too(comm):
    x = torch.ones(2, requires_grad=True)
    loss = F.allreduce(comm, x).sum()
    if comm.rank == 0:
        with pytest.raises(ThreadError, match="in thread 'worker'"):
            Worker(loss.backward).result()
    else:
        wait_until_broken(comm)
        with pytest.raises(PeerError, match="in thread 'worker'"):
            loss.backward()


@ranks(1)
def test_a_rank_alone_mixes_up_nothing(comm):
    comm.barrier()
    assert Worker(comm.allreduce, torch.ones(2)).result().tolist() == [1.0, 1.0]


def test_a_thread_of_a_rank_that_raises_ends_the_world_of_threads() -> None:
    def work(comm: Communicator) -> None:
        def receive_and_fail() -> None:
            comm.recv(1, tag=1)
            raise KeyError("the reason")

        if comm.rank == 0:
            threading.Thread(target=receive_and_fail).start()
        else:
            comm.send(torch.ones(1), 0, tag=1)
        comm.recv(1 - comm.rank, tag=2)

    with pytest.raises(KeyError, match="the reason"):
        torchmn.run_threads(work, 2, timeout=30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_not_communicated_ends_alone_in_the_world_of_threads() -> None:
    def work(comm: Communicator) -> float:
        def fail() -> None:
            raise KeyError("the reason")

        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        return comm.allreduce(torch.ones(1)).item()

    before = threading.excepthook
    assert torchmn.run_threads(work, 2, timeout=30) == [2.0, 2.0]
    assert threading.excepthook is before


def test_two_threads_in_the_world_of_threads_raise_the_error_of_the_second() -> None:
    def work(comm: Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            threading.Thread(target=comm.barrier, name="second").start()
            comm.recv(1, tag=2)
        comm.barrier()

    with pytest.raises(ThreadError, match=r"^rank 0 of 2: barrier of communicator 'world' in thread 'second'"):
        torchmn.run_threads(work, 2, timeout=30)
