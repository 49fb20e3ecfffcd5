"""Files in each form of neon's experiment files train, in the mode that they name, with the numbers of one rank."""

# ruff: noqa: E501  (a message is one line)

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import torchmn
from tests.docs.pages import page
from tests.experiment.neon_samples import DISTRIBUTED, FOLDER, SAMPLES, Sample, samples_table
from tests.experiment.running import Ran, check, open_session, parse, read, train
from tests.experiment.test_neon import PUBLIC, edited
from torchmn.errors import ExperimentError
from torchmn.experiment import Experiment, parse_set
from torchmn.modes import mode_of


@pytest.fixture(scope="module")
def cifar(tmp_path_factory) -> str:
    """A directory with files in the format of CIFAR-10, of 20 images each."""
    folder = tmp_path_factory.mktemp("cifar")
    numbers = np.random.default_rng(0)
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        records = numbers.integers(0, 256, (20, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(20) % 10
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return str(folder)


def chosen(sample: Sample) -> Experiment:
    return check(parse(sample.name, sample.text).document, [parse_set(change) for change in sample.changes()])


@functools.cache
def alone(sample: Sample, data: str | None) -> Ran:
    return train(chosen(sample), data=data)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sample", DISTRIBUTED, ids=lambda sample: sample.path)
def test_a_distributed_file_trains_in_its_mode_with_the_numbers_of_one_rank(sample, ranks, cifar):
    data = cifar if sample.needs_cifar else None
    experiment = chosen(sample)
    modes = torchmn.run_threads(lambda comm: open_session(experiment, comm, data).placed.mode, ranks)
    assert modes == [mode_of(sample.mode).name] * ranks
    expected, ran = alone(sample, data), train(experiment, ranks, data=data)
    assert len(ran.losses) >= 3
    assert ran.losses == pytest.approx(expected.losses, rel=1e-9)
    assert ran.history[-1] == pytest.approx(expected.history[-1], rel=1e-9)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(ran.weights[name], weight, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sample", [s for s in SAMPLES if not s.mode], ids=lambda sample: sample.path)
def test_a_file_for_one_process_trains(sample, cifar):
    ran = alone(sample, cifar if sample.needs_cifar else None)
    assert ran.finished and len(ran.losses) >= 3 and np.isfinite(ran.losses).all()


def test_the_guide_lists_the_files_that_run():
    assert sorted(f"{sample.path}.yaml" for sample in SAMPLES) == sorted(
        str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.yaml")
    )
    assert samples_table() in page("from-neon.md")


REFUSED = {
    "`RBM`": (edited("models.MLP", "models.RBM"), "the model RBM is not supported"),
    "`DBN`": (edited("models.MLP", "models.DBN"), "the model DBN is not supported"),
    "`RNN`": (edited("models.MLP", "models.RNN"), "the model RNN is not supported"),
    "`RecurrentHiddenLayer`": (edited("layers.DropOutLayer", "layers.RecurrentHiddenLayer"), "RecurrentHiddenLayer is not supported"),
    "`RecurrentLSTMLayer`": (edited("layers.DropOutLayer", "layers.RecurrentLSTMLayer"), "RecurrentLSTMLayer is not supported"),
    "`I1K`": (edited("datasets.MNIST", "datasets.I1K"), "the data set I1K is not supported"),
    "`NDSB`": (edited("datasets.MNIST", "datasets.NDSB"), "the data set NDSB is not supported"),
    "`Hurricane`": (edited("datasets.MNIST", "datasets.Hurricane"), "the data set Hurricane is not supported"),
    "`!hyperopt`": (edited("keep: 0.8", "keep: !hyperopt share FLOAT 0.5 1"), "!hyperopt share FLOAT 0.5 1 is a range"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_converted_is_refused_by_name(text, message):
    assert text != PUBLIC.read_text()
    with pytest.raises(ExperimentError, match=message):
        read("old.yaml", text)


def test_the_guide_names_what_is_not_converted():
    assert f"These are refused by name: {', '.join(REFUSED)}." in " ".join(page("from-neon.md").split())
