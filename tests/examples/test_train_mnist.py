"""examples/chainermn/train_mnist.py: the same losses at any number of ranks, under any launcher, and after a resume."""

import pytest

from tests.examples.running import epochs, run_example


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    run_example("chainermn/train_mnist.py", "alone", out, "-b", "100", "--float64")
    return epochs(out)


def test_it_learns(alone):
    assert alone["epoch"] == [1, 2]
    assert alone["step"] == [60, 120]
    assert alone["loss"][0] > alone["loss"][1]
    assert alone["test accuracy"][-1] > 0.88


def test_two_ranks_that_stop_and_are_resumed_over_another_transport_print_the_losses_of_one(alone, tmp_path):
    run_example(
        "chainermn/train_mnist.py", "mpiexec", tmp_path, "-b", "50", "--float64", "-e", "1", "--communicator", "naive"
    )
    resumed = run_example("chainermn/train_mnist.py", "torchrun", tmp_path, "-b", "50", "--float64", "--resume")
    assert "resumed after epoch 1" in resumed.stdout
    together = epochs(tmp_path)
    assert together["epoch"] == [1, 2]
    for name in ("loss", "test loss", "test accuracy"):
        assert together[name] == pytest.approx(alone[name], rel=1e-9)
