"""examples/chainermn/train_cifar.py: batch normalisation over all ranks, and data that only rank 0 has."""

from tests.examples.running import epochs, run_example


def test_it_learns_alone(tmp_path):
    run_example("chainermn/train_cifar.py", "alone", tmp_path)
    log = epochs(tmp_path)
    assert log["step"] == [50, 100, 150]
    assert log["test accuracy"][-1] > 0.5


def test_two_ranks_learn_and_are_resumed_over_another_transport(tmp_path):
    run_example("chainermn/train_cifar.py", "mpiexec", tmp_path, "-e", "2")
    resumed = run_example("chainermn/train_cifar.py", "torchrun", tmp_path, "--resume")
    assert "resumed after epoch 2" in resumed.stdout
    log = epochs(tmp_path)
    assert log["epoch"] == [1, 2, 3]
    assert log["step"] == [25, 50, 25]  # half as many as alone: an epoch is an epoch
    assert log["loss"] == sorted(log["loss"], reverse=True)
    assert log["test accuracy"][-1] > 0.5
