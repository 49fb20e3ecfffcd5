"""A damaged checkpoint is detected and skipped with a message, and the previous one is loaded."""

import random
import shutil
from pathlib import Path

import pytest
import torch

import torchmn
from tests.training.checkpoint.runs import Training
from torchmn import create_multi_node_checkpointer


def two_checkpoints(path: Path, size: int = 2) -> Path:
    """Saves two checkpoints, some of whose tensors differ between ranks; returns the directory of the newer one."""

    def save(comm):
        training = Training(comm)
        checkpointer = create_multi_node_checkpointer("run", comm, path)
        for step in (1, 2):
            training.train(1)
            checkpointer.save(step, extra=(step, torch.full((50,), float(comm.rank + step))), **training.parts)

    torchmn.run_threads(save, size)
    return next(path.glob("run.step-*2.save-*"))


def load(path: Path, size: int = 2) -> list[int | None]:
    """Returns the step that each rank loads, after checking the values."""

    def work(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, path)
        step = checkpointer.maybe_load(**Training(comm).parts)
        if step is not None:
            assert checkpointer.extra[0] == step
            assert checkpointer.extra[1].eq(comm.rank + step).all()
        return step

    return torchmn.run_threads(work, size)


FILES = ("manifest.json", "common.safetensors", "rank-0.safetensors", "rank-1.safetensors")


@pytest.mark.parametrize("file", FILES)
def test_one_changed_byte_anywhere_is_found(tmp_path, caplog, file):
    target = two_checkpoints(tmp_path) / file
    whole = target.read_bytes()
    places = [0, 8, len(whole) // 3, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 4)]
    for place in places:
        caplog.clear()
        target.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        assert load(tmp_path) == [1, 1], f"byte {place} of {len(whole)}"
        assert "checkpoint 'run' of step 2 (save 2) is skipped" in caplog.text
        assert file in caplog.text
        assert len(caplog.messages) == 1
    target.write_bytes(whole)
    assert load(tmp_path) == [2, 2]


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_or_missing_file_is_found(tmp_path, caplog, file):
    target = two_checkpoints(tmp_path) / file
    whole = target.read_bytes()
    for length in (0, 7, len(whole) // 2, len(whole) - 1):
        target.write_bytes(whole[:length])
        assert load(tmp_path) == [1, 1], length
    target.write_bytes(whole + b"\0")
    assert load(tmp_path) == [1, 1]
    target.unlink()
    caplog.clear()
    assert load(tmp_path) == [1, 1]
    assert f"{file} is missing" in caplog.text


def test_files_of_another_save_are_found(tmp_path):
    newer = two_checkpoints(tmp_path)
    older = next(tmp_path.glob("run.step-*1.save-*"))
    shutil.copy(older / "common.safetensors", newer / "common.safetensors")
    assert load(tmp_path) == [1, 1]
    shutil.rmtree(newer)
    shutil.copytree(older, newer)
    assert load(tmp_path) == [1, 1]


def test_with_no_good_checkpoint_left_nothing_is_loaded(tmp_path, caplog):
    two_checkpoints(tmp_path)
    for file in tmp_path.glob("*/common.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    assert load(tmp_path) == [None, None]
    assert len(caplog.messages) == 2


def test_a_damaged_checkpoint_does_not_count_among_those_to_keep(tmp_path):
    newer = two_checkpoints(tmp_path)
    tensors = newer / "common.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"?")

    def go_on(comm):
        training = Training(comm)
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path, keep=2)
        assert checkpointer.maybe_load(**training.parts) == 1
        checkpointer.save(2, extra=(2, torch.full((50,), comm.rank + 2.0)), **training.parts)

    torchmn.run_threads(go_on, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.step-0000000001.save-000001",
        "run.step-0000000002.save-000002",
        "run.step-0000000002.save-000003",
    ]
    assert load(tmp_path) == [2, 2]
