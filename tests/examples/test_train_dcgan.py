"""examples/chainermn/train_dcgan.py: two models and two optimizers, and pictures of what they make."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

from tests.examples.running import epochs, run_example


def write_cifar10(folder: Path) -> None:
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(1, 6):
        labels = draw.integers(0, 10, (80, 1), np.uint8)
        records = np.concatenate([labels, draw.integers(0, 256, (80, 3072), np.uint8)], axis=1)
        (folder / f"data_batch_{number}.bin").write_bytes(records.tobytes())


def assert_learnt(out: Path) -> None:
    log = epochs(out)
    assert log["epoch"] == [1, 2]
    assert log["dis loss"][1] < log["dis loss"][0]
    assert log["dis accuracy"][1] > 0.5


def test_photographs_alone(tmp_path):
    write_cifar10(tmp_path / "cifar")
    run_example("chainermn/train_dcgan.py", "alone", tmp_path / "out", "--data", str(tmp_path / "cifar"))
    assert_learnt(tmp_path / "out")
    assert imread(tmp_path / "out" / "epoch-0002.png").shape == (320, 320, 3)


def test_digits_on_two_ranks_resumed_over_another_transport(tmp_path):
    run_example("chainermn/train_dcgan.py", "mpiexec", tmp_path, "-e", "1")
    first = imread(tmp_path / "epoch-0001.png")
    resumed = run_example("chainermn/train_dcgan.py", "torchrun", tmp_path, "--resume")
    assert "resumed after epoch 1" in resumed.stdout
    assert_learnt(tmp_path)
    second = imread(tmp_path / "epoch-0002.png")
    assert first.shape == second.shape == (320, 320)
    assert (first != second).any()
