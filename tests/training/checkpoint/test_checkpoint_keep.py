"""Old checkpoints are removed, and no other files."""

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from torchmn.training.checkpoint import CheckpointError, create_multi_node_checkpointer


def saved(path) -> list[int]:
    """Returns the numbers of the saves on disk."""
    return sorted(int(directory.name[-6:]) for directory in path.glob("run.step-*"))


@ranks(1, 3, on="threads")
@pytest.mark.parametrize("keep", [1, 2, 5, None])
def test_the_newest_checkpoints_are_kept(comm, tmp_path, keep):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path, keep=keep)
    for step in range(7):
        checkpointer.save(step, extra=torch.ones(3))
        checkpointer.wait()
        expected = list(range(1, step + 2))[-(keep or 100) :]
        assert saved(tmp_path) == expected
        comm.barrier()
    again = create_multi_node_checkpointer("run", comm, tmp_path, keep=keep)
    again.save(3)
    again.wait()
    assert saved(tmp_path) == list(range(1, 9))[-(keep or 100) :]


@ranks(2, on="threads")
def test_other_names_and_foreign_files_are_not_touched(comm, tmp_path):
    other = create_multi_node_checkpointer("run.step-0000000001", comm, tmp_path)
    other.save(1)
    other.wait()
    foreign = (
        "notes.txt",
        "run.step-1.save-1",
        ".run.step-0000000009.save-000009",
        "run.step-0000000009.save-000009.old",
    )
    if comm.rank == 0:
        for name in foreign:
            (tmp_path / name).mkdir()
            (tmp_path / name / "rank-0.safetensors").write_bytes(b"mine")
    comm.barrier()
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path, keep=1)
    checkpointer.save(1)
    checkpointer.wait()
    if comm.rank == 0:
        (tmp_path / "run.step-0000000001.save-000001" / "notes.txt").write_text("mine")
    comm.barrier()
    checkpointer.save(2)
    checkpointer.wait()
    for name in foreign:
        assert (tmp_path / name / "rank-0.safetensors").read_bytes() == b"mine"
    assert [file.name for file in (tmp_path / "run.step-0000000001.save-000001").iterdir()] == ["notes.txt"]
    assert other.maybe_load() == 1
    assert checkpointer.maybe_load() == 2


@ranks(2, on="threads")
def test_an_exception_in_training_or_in_a_save_removes_nothing(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path, keep=1)
    checkpointer.save(1, extra="good")
    bad = {"deep": [object()]} if comm.rank == 1 else {"deep": [1]}
    words = ("rank 1 of 2", "save", "extra/deep/0", "builtins.object")
    assert_refused(comm, lambda: checkpointer.save(2, extra=bad), *words, kind=CheckpointError)
    assert [path.name for path in tmp_path.iterdir()] == ["run.step-0000000001.save-000001"]
    comm.barrier()
    if comm.rank == 0:
        with pytest.raises(ZeroDivisionError):
            torchmn.run_threads(lambda comm: create_multi_node_checkpointer("run", comm, tmp_path) and 1 / 0, 1)
    assert (checkpointer.maybe_load(), checkpointer.extra) == (1, "good")


@ranks(2, on="threads")
def test_remains_of_killed_saves_are_removed_by_the_next_save(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    left = tmp_path / ".run.step-0000000005.save-000001.partial"
    if comm.rank == 0:
        left.mkdir()
        (left / "common.safetensors").write_bytes(b"half")
    comm.barrier()
    assert checkpointer.maybe_load() is None
    assert left.exists()
    comm.barrier()
    checkpointer.save(6)
    checkpointer.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["run.step-0000000006.save-000002"]


@ranks(2, on="threads")
def test_of_a_link_to_a_moved_checkpoint_only_the_link_is_removed(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path / "here", keep=1)
    checkpointer.save(1, extra=torch.ones(3))
    link, archive = tmp_path / "here" / "run.step-0000000001.save-000001", tmp_path / "archive"
    checkpointer.wait()
    if comm.rank == 0:
        link.rename(archive)
        link.symlink_to(archive)
    comm.barrier()
    assert checkpointer.maybe_load() == 1
    checkpointer.save(2)
    checkpointer.wait()
    assert not link.is_symlink()
    assert sorted(file.name for file in archive.iterdir()) == ["common.safetensors", "manifest.json"]


@ranks(2, on="threads")
def test_a_file_named_like_a_checkpoint_is_kept_and_ignored(comm, tmp_path, caplog):
    names = ("run.step-0000000001.save-000001", ".run.step-0000000001.save-000002.partial")
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path, keep=1)
    if comm.rank == 0:
        for name in names:
            (tmp_path / name).write_text("mine")
        (tmp_path / "run.step-0000000001.save-000003").mkdir()
        (tmp_path / "run.step-0000000001.save-000003" / "manifest.json").write_text("[" * 100_000)
    comm.barrier()
    checkpointer.save(4)
    checkpointer.save(5)
    checkpointer.wait()
    assert [(tmp_path / name).read_text() for name in names] == ["mine", "mine"]
    assert "cannot remove" not in caplog.text
    assert saved(tmp_path) == [1, 5]
    assert checkpointer.maybe_load() == 5
