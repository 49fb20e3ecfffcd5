"""Ranks that share a directory write common state once; ranks with separate disks load from their disk."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import filled
from tests.training.checkpoint.runs import Training, parameters
from torchmn import create_multi_node_checkpointer


def names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


@ranks(1, 2, 4, on="threads")
@ranks(3, on="mpi")
def test_what_all_ranks_have_is_written_once_by_one_rank(comm, tmp_path):
    model = filled(nn.Linear(3, 2), 0)
    mine = torch.full((5,), float(comm.rank))
    pair = torch.full((5,), float(comm.rank // 2))
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    checkpointer.save(1, model=model, extra={"mine": mine, "pair": pair})
    checkpointer.wait()
    directory = tmp_path / "run.step-0000000001.save-000001"
    common = load_file(directory / "common.safetensors")
    assert common["model/weight"].equal(model.weight) and common["model/bias"].equal(model.bias)
    if comm.size > 1:
        own = load_file(directory / f"rank-{comm.rank}.safetensors")
        assert own["extra/mine"].equal(mine)
        assert "model/weight" not in own
        if comm.size > 2:
            assert ("extra/pair" in own) == (comm.rank % 2 == 0), "the first of those that have it writes it"
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    assert checkpointer.maybe_load() == 1
    assert checkpointer.extra["mine"].equal(mine) and checkpointer.extra["pair"].equal(pair)


@ranks(2, 3, on="threads")
@ranks(3, on="mpi")
def test_ranks_with_separate_disks_resume_bit_for_bit(comm, tmp_path):
    path = tmp_path / f"disk {comm.rank}"
    checkpointer = create_multi_node_checkpointer("run", comm, path)
    whole = Training(comm)
    whole.train(2)
    checkpointer.save(2, extra=comm.rank, **whole.parts)
    whole.train(2)
    resumed = Training(comm)
    assert checkpointer.maybe_load(**resumed.parts) == 2
    assert checkpointer.extra == comm.rank
    resumed.train(2)
    assert resumed.result() == whole.result()
    assert "run.step-0000000002.save-000001/common.safetensors" in names(path)


def test_ranks_that_share_a_disk_in_pairs_write_common_state_once_per_disk(tmp_path):
    def work(comm):
        (tmp_path / f"link {comm.rank}").symlink_to(tmp_path / f"disk {comm.rank // 2}")
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path / f"link {comm.rank}")
        checkpointer.save(1, extra={"all": torch.ones(3), "mine": torch.full((2,), float(comm.rank))})
        assert checkpointer.maybe_load() == 1
        return checkpointer.extra["mine"].tolist()

    for disk in range(2):
        (tmp_path / f"disk {disk}").mkdir()
    assert torchmn.run_threads(work, 4) == [[float(rank)] * 2 for rank in range(4)]
    for disk in range(2):
        files = {Path(name).name for name in names(tmp_path / f"disk {disk}")}
        assert {"common.safetensors", f"rank-{2 * disk}.safetensors", f"rank-{2 * disk + 1}.safetensors"} <= files
        assert f"rank-{2 - 2 * disk}.safetensors" not in files


def test_the_newest_step_that_all_disks_have_is_chosen(tmp_path, caplog):
    def save(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path / str(comm.rank))
        for step in (1, 2, 3):
            checkpointer.save(step, extra=step)

    def load(comm):
        return create_multi_node_checkpointer("run", comm, tmp_path / str(comm.rank)).maybe_load()

    torchmn.run_threads(save, 3)
    shutil.rmtree(tmp_path / "1" / "run.step-0000000003.save-000003")
    assert torchmn.run_threads(load, 3) == [2, 2, 2]
    assert "of step 3 (save 3) is skipped:\n  rank 1 of 3: it is not on this disk" in caplog.text
    shutil.rmtree(tmp_path / "2" / "run.step-0000000002.save-000002")
    assert torchmn.run_threads(load, 3) == [1, 1, 1]
    shutil.rmtree(tmp_path / "0" / "run.step-0000000001.save-000001")
    assert torchmn.run_threads(load, 3) == [None] * 3


def test_saves_of_different_runs_with_the_same_number_are_not_mixed(tmp_path, caplog):
    def save(comm, run):
        create_multi_node_checkpointer("run", comm, tmp_path / run / str(comm.rank)).save(1, extra=run)

    def load(comm):
        return create_multi_node_checkpointer("run", comm, tmp_path / "a" / str(comm.rank)).maybe_load()

    for run in ("a", "b"):
        torchmn.run_threads(lambda comm, run=run: save(comm, run), 2)
    shutil.rmtree(tmp_path / "a" / "1")
    shutil.copytree(tmp_path / "b" / "1", tmp_path / "a" / "1")
    assert torchmn.run_threads(load, 2) == [None, None]
    assert "another save" in caplog.text


def test_a_checkpoint_that_another_disk_lost_is_not_removed(tmp_path):
    def save(comm, steps):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path / str(comm.rank), keep=1)
        for step in steps:
            checkpointer.save(step)
        checkpointer.wait()

    torchmn.run_threads(lambda comm: save(comm, [1]), 2)
    shutil.rmtree(tmp_path / "1")
    torchmn.run_threads(lambda comm: save(comm, [2, 3, 4]), 2)
    assert sorted(path.name[-6:] for path in (tmp_path / "0").iterdir()) == ["000001", "000004"]
    assert sorted(path.name[-6:] for path in (tmp_path / "1").iterdir()) == ["000004"]


def test_common_state_on_separate_disks_loads_on_fewer_ranks(tmp_path):
    def stage(comm):
        training = Training(comm)
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path / str(comm.rank))
        done = checkpointer.maybe_load(**training.parts)
        if done is None:
            training.train(2)
            checkpointer.save(2, **training.parts)
        return done, parameters(training).tolist()

    saved = torchmn.run_threads(stage, 4)
    assert torchmn.run_threads(stage, 2) == [(2, saved[0][1])] * 2
