"""The model-parallel examples: they learn, and print the losses of one process."""

import importlib.util
import json
from pathlib import Path

import pytest

import torchmn
from tests._worlds import run_job
from tests.examples.running import EXAMPLES, epochs, run_example


def losses(out: Path) -> list[float]:
    """The loss of every step."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "epoch" not in row]


def last(out: Path, name: str) -> float:
    return json.loads((out / "log.jsonl").read_text().splitlines()[-1])[name]


def example(name: str):
    """An example as a module, for what can be seen without starting processes."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_forms_of_the_mlp_and_one_process_have_the_same_loss_at_every_step(tmp_path):
    name = "chainermn/train_mnist_model_parallel.py"
    run_example(name, "alone", tmp_path / "alone", "--single", "-e", "1")
    run_example(name, "mpiexec", tmp_path / "chain", "-e", "1")
    printed = run_example(name, "mpiexec", tmp_path / "explicit", "-e", "1", "--explicit", "--print-steps")
    alone = losses(tmp_path / "alone")
    assert len(alone) == 60 and alone[0] == pytest.approx(2.3, abs=0.1) and alone[-1] < 0.8
    assert losses(tmp_path / "chain") == alone
    assert losses(tmp_path / "explicit") == alone
    assert f"epoch 1, step 60: loss {alone[-1]:.8f}" in printed.stdout
    accuracies = {last(tmp_path / form, "test accuracy") for form in ("alone", "chain", "explicit")}
    assert len(accuracies) == 1 and accuracies.pop() > 0.84


def test_pairs_of_ranks_print_the_losses_of_one_pair(tmp_path):
    run_example("chainermn/train_mnist_dual_parallel.py", "mpiexec", tmp_path / "two", "--float64", "-e", "1")
    four = ["--quick", "--out", str(tmp_path / "four"), "--float64", "-b", "50", "-e", "1"]
    result = run_job(EXAMPLES / "chainermn/train_mnist_dual_parallel.py", 4, args=four, timeout=150)
    assert result.returncode == 0, result.output
    assert "4 rank(s), 2 pair(s)" in result.stdout
    one_pair, two_pairs = epochs(tmp_path / "two"), epochs(tmp_path / "four")
    assert two_pairs["loss"] == pytest.approx(one_pair["loss"], rel=1e-9)
    assert two_pairs["test accuracy"] == one_pair["test accuracy"]
    assert one_pair["test accuracy"][-1] > 0.84


def test_a_convolution_split_by_channels_is_the_whole_one(tmp_path):
    run_example("chainermn/parallel_convolution.py", "alone", tmp_path / "alone", "--float64", "-b", "100")
    run_example("chainermn/parallel_convolution.py", "mpiexec", tmp_path / "two", "--float64", "-b", "100")
    alone = losses(tmp_path / "alone")
    assert len(alone) == 60 and alone[-1] < 0.8
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=1e-9)
    assert last(tmp_path / "two", "test accuracy") == last(tmp_path / "alone", "test accuracy") > 0.85


def test_an_ensemble_is_better_than_its_members_on_average(tmp_path):
    run_example("ensemble.py", "mpiexec", tmp_path, "-e", "1")
    log = epochs(tmp_path)
    assert log["worst member"][-1] > 0.8
    assert log["ensemble"][-1] > log["mean of members"][-1]


def test_an_encoder_and_a_decoder_on_two_ranks_learn_to_write_numbers_backwards(tmp_path):
    run_example("chainermn/seq2seq_model_parallel.py", "mpiexec", tmp_path)
    log = epochs(tmp_path)
    assert log["loss"][1] < 0.5 * log["loss"][0]
    assert log["test accuracy"][-1] > 0.9


@pytest.mark.parametrize("size", [1, 3])
def test_a_wrong_number_of_processes_is_an_error_on_every_rank(size):
    model_parallel, dual = (
        example("chainermn/train_mnist_model_parallel"),
        example("chainermn/train_mnist_dual_parallel"),
    )
    seq2seq = example("chainermn/seq2seq_model_parallel")

    def body(comm):
        with pytest.raises(SystemExit, match=f"rank {comm.rank} of {size}: this model needs 2 process.*got {size}"):
            model_parallel.demand_processes(comm, 2)
        with pytest.raises(SystemExit, match=f"rank {comm.rank} of {size}: .*even number .* needed, got {size}"):
            dual.demand_pairs(comm)
        with pytest.raises(SystemExit, match=f"rank {comm.rank} of {size}: .* need 2 processes, got {size}"):
            seq2seq.demand_two_processes(comm)

    torchmn.run_threads(body, size)
