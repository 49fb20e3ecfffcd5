"""A thread writes a checkpoint while the training continues: it is complete or absent, and its failure is raised."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused, filled
from tests._worlds.jobs import run_job
from torchmn import create_multi_node_checkpointer
from torchmn.training.checkpoint import CheckpointError


class Disk:
    """Takes the place of `os.fsync`: can hold up the files of a name, or refuse them as a full disk does."""

    def __init__(self, fsync: Callable[[int], None]):
        self._fsync = fsync
        self.held = ""
        self.full = ""
        self.reached = threading.Event()
        self.released = threading.Event()

    def __call__(self, descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if self.full and name.startswith(self.full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.held and name.startswith(self.held):
            self.reached.set()
            assert self.released.wait(60)
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    result = Disk(os.fsync)
    monkeypatch.setattr(os, "fsync", result)
    return result


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def training(comm: Any) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and a function that makes a step."""
    model = filled(nn.Linear(3, 2), 0)
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.Adam(model.parameters()), comm, model=model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.full((4, 3), float(comm.rank + 1))).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


@ranks(1, 2, 3, on="threads")
@ranks(2, on="mpi")
def test_what_changes_after_save_has_returned_is_not_in_the_checkpoint(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    model, mine = filled(nn.Linear(300, 300), 0), torch.full((100_000,), float(comm.rank))
    before = model.weight.detach().clone()
    checkpointer.save(1, model=model, extra=mine)
    with torch.no_grad():
        model.weight.zero_()
    mine.zero_()
    assert checkpointer.maybe_load(model=model) == 1
    assert model.weight.equal(before)
    assert checkpointer.extra.eq(comm.rank).all()


@pytest.mark.parametrize(
    ("size", "held"), [(1, "common"), (1, "manifest"), (3, "common"), (3, "rank"), (3, "manifest")]
)
def test_training_continues_during_the_write_of_a_checkpoint_that_is_absent_until_it_is_complete(
    size, held, disk, tmp_path
):
    def work(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path, keep=1)
        model, optimizer, step = training(comm)
        checkpointer.save(1, model=model, optimizer=optimizer)
        checkpointer.wait()
        if comm.rank == 0:
            disk.held = held
        comm.barrier()
        checkpointer.save(2, model=model, optimizer=optimizer, extra={"rank": torch.full((9,), float(comm.rank))})
        for _ in range(3):
            step()
        if comm.rank == 0:
            assert disk.reached.wait(60)
        comm.barrier()
        other = create_multi_node_checkpointer("run", comm, tmp_path, keep=1)
        found = other.maybe_load()
        comm.barrier()
        disk.released.set()
        checkpointer.wait()
        assert names(tmp_path) == ["run.step-0000000002.save-000002"]
        return found

    assert torchmn.run_threads(work, size) == [1] * size


def test_the_next_save_waits_for_the_last(disk, tmp_path):
    disk.held = "common"
    order = []

    def release() -> None:
        assert disk.reached.wait(60)
        order.append("released")
        disk.released.set()

    def work(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
        checkpointer.save(1, extra=1)
        checkpointer.save(2, extra=2)
        order.append("second")

    thread = threading.Thread(target=release)
    thread.start()
    torchmn.run_threads(work, 1)
    thread.join()
    assert order == ["released", "second"]
    assert len(names(tmp_path)) == 2


ON_ALL_RANKS: dict[str, Callable[..., object]] = {
    "save": lambda comm, checkpointer, step: checkpointer.save(3),
    "wait": lambda comm, checkpointer, step: checkpointer.wait(),
    "maybe_load": lambda comm, checkpointer, step: checkpointer.maybe_load(),
    "step": lambda comm, checkpointer, step: step(),
}


@pytest.mark.parametrize("full", ["common", "rank-0", "rank-1", "rank-2", "manifest"])
@pytest.mark.parametrize("call", ON_ALL_RANKS)
def test_a_full_disk_raises_on_all_ranks_once_and_the_previous_checkpoint_stays(call, full, disk, tmp_path):
    def work(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path, keep=1)
        model, optimizer, step = training(comm)
        step()
        state = {"model": model, "optimizer": optimizer}
        checkpointer.save(1, extra=torch.full((9,), float(comm.rank)), **state)
        checkpointer.wait()
        saved = model.weight.detach().clone()
        step()
        comm.barrier()
        disk.full = full
        checkpointer.save(2, extra=torch.full((9,), float(comm.rank)), **state)
        for task in comm.background:
            task.join()
        call_again = lambda: ON_ALL_RANKS[call](comm, checkpointer, step)  # noqa: E731
        rank = full[-1] if full.startswith("rank") else "0"
        assert_refused(
            comm, call_again, f"rank {rank} of 3", "No space left on device", "save: step 2: ", kind=CheckpointError
        )
        disk.full = ""
        assert names(tmp_path) == ["run.step-0000000001.save-000001"]
        assert checkpointer.maybe_load(**state) == 1
        assert model.weight.equal(saved) and checkpointer.extra.eq(comm.rank).all()
        step()
        checkpointer.save(3, **state)
        step()
        checkpointer.wait()
        assert names(tmp_path) == ["run.step-0000000003.save-000002"]

    torchmn.run_threads(work, 3)


def test_one_full_disk_of_several_leaves_the_checkpoint_that_all_have(disk, tmp_path):
    def work(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path / str(comm.rank), keep=1)
        mine = torch.full((9,), float(comm.rank))
        checkpointer.save(1, extra=mine)
        checkpointer.wait()
        disk.full = "rank-1"
        checkpointer.save(2, extra=mine)
        assert_refused(comm, checkpointer.wait, "rank 1 of 2", "No space left on device", kind=CheckpointError)
        disk.full = ""
        assert checkpointer.maybe_load() == 1
        assert checkpointer.extra.equal(mine)
        checkpointer.save(3, extra=mine)
        checkpointer.wait()
        assert checkpointer.maybe_load() == 3

    torchmn.run_threads(work, 2)


@pytest.mark.parametrize("size", [1, 2])
def test_finalize_waits_for_a_checkpoint_and_raises_its_failure(size, disk, tmp_path):
    def work(comm):
        own = comm.split(0, comm.rank)
        checkpointer = create_multi_node_checkpointer("run", own, tmp_path)
        checkpointer.save(1)
        own.finalize()
        assert (tmp_path / "run.step-0000000001.save-000001").is_dir()
        comm.barrier()
        other = comm.split(0, comm.rank)
        checkpointer = create_multi_node_checkpointer("run", other, tmp_path)
        comm.barrier()
        disk.full = "common"
        checkpointer.save(2)
        with pytest.raises(CheckpointError, match="No space left on device" if comm.rank == 0 else "another rank"):
            other.finalize()
        other.finalize()  # does nothing

    torchmn.run_threads(work, size)


def test_ranks_that_are_threads_end_with_their_last_checkpoint_or_with_its_failure(disk, tmp_path):
    def work(comm):
        create_multi_node_checkpointer("run", comm, tmp_path).save(1)

    torchmn.run_threads(work, 2)
    assert names(tmp_path) == ["run.step-0000000001.save-000001"]
    disk.full = "common"
    with pytest.raises(CheckpointError, match=r"save: step 1: .*(No space left on device|another rank)"):
        torchmn.run_threads(work, 2)
    assert names(tmp_path) == ["run.step-0000000001.save-000001"]


END = """
import resource, sys
import torch, torchmn

comm = torchmn.create_communicator()

def main():
    checkpointer = torchmn.create_multi_node_checkpointer("run", comm, sys.argv[1])
    if sys.argv[2] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    checkpointer.save(4, extra=torch.arange(10_000))

main()
"""


@pytest.mark.parametrize(("transport", "n"), [("solo", 1), ("mpi", 2)])
def test_a_process_that_ends_completes_its_checkpoint_or_fails(transport, n, tmp_path):
    result = run_job(END, n, transport, args=[str(tmp_path), "enough"])
    assert result.returncode == 0, result.output
    assert names(tmp_path) == ["run.step-0000000004.save-000001"]
    result = run_job(END, n, transport, args=[str(tmp_path), "full"])
    assert result.returncode != 0
    assert "save: step 4: cannot write" in result.output and "File too large" in result.output
    assert names(tmp_path) == ["run.step-0000000004.save-000001"]


def test_saving_and_loading_many_tensors_sets_off_no_garbage_collections_in_the_main_thread(tmp_path):
    collections = []

    def count(phase: str, _: Any) -> None:
        if phase == "start" and threading.current_thread().name == "rank 0":
            collections.append(phase)

    def work(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
        many = {str(number): torch.zeros(1) for number in range(3000)}
        gc.callbacks.append(count)
        try:
            checkpointer.save(1, extra=many)
            checkpointer.maybe_load()
        finally:
            gc.callbacks.remove(count)
        assert gc.isenabled()

    torchmn.run_threads(work, 1)
    assert len(collections) < 5
