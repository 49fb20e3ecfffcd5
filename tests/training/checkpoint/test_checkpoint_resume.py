"""A run that is resumed from a checkpoint has the results of the uninterrupted run."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused, filled
from tests.training.checkpoint.runs import Batches, Training, parameters, seed_everything
from torchmn.training.checkpoint import CheckpointError, create_multi_node_checkpointer


@ranks(1, on="solo")
@ranks(3, on="mpi")  # not threads: those share the random generators of their process
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    seed_everything(comm.rank)
    whole = Training(comm, noise=True)
    whole.train(6)
    random.gauss(0, 1)  # Python and NumPy now have a second number cached
    np.random.standard_normal()
    checkpointer.save(6, extra={"rank": comm.rank}, **whole.parts)
    whole.train(7)
    expected = whole.result()

    seed_everything(1000)
    resumed = Training(comm, noise=True)
    assert checkpointer.maybe_load(**resumed.parts) == 6
    assert checkpointer.extra == {"rank": comm.rank}
    resumed.train(7)
    assert resumed.result() == expected


@ranks(1, 2, 3, 4, 6, on="threads")
def test_a_resumed_run_without_noise_is_bit_for_bit_the_uninterrupted_one(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    whole = Training(comm)
    whole.train(4)
    checkpointer.save(4, **whole.parts)
    whole.train(5)
    resumed = Training(comm)
    resumed.train(1)
    assert checkpointer.maybe_load(**resumed.parts) == 4
    resumed.train(5)
    assert resumed.result() == whole.result()


def test_a_run_resumes_on_another_number_of_ranks(tmp_path):
    def stage(comm):
        training = Training(comm)
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
        done = checkpointer.maybe_load(**training.parts) or 0
        training.train(4)
        checkpointer.save(done + 4, **training.parts)
        return done, parameters(training)

    def uninterrupted(comm):
        training = Training(comm)
        training.train(16)
        return parameters(training)

    results = [torchmn.run_threads(stage, size) for size in (4, 2, 3, 1)]
    assert [[done for done, _ in ranks] for ranks in results] == [[0] * 4, [4] * 2, [8] * 3, [12]]
    (expected,) = torchmn.run_threads(uninterrupted, 1)
    np.testing.assert_allclose(results[-1][0][1], expected, rtol=1e-10)


def test_an_iterator_whose_position_differed_is_unchanged_on_another_number_of_ranks(tmp_path, caplog):
    def save(comm):
        batches = Batches(60, seed=comm.rank)
        next(batches)
        create_multi_node_checkpointer("run", comm, tmp_path).save(1, iterator=batches)
        return next(batches).tolist()

    def load(comm, **options):
        batches = Batches(60, seed=50)
        assert create_multi_node_checkpointer("run", comm, tmp_path).maybe_load(iterator=batches, **options) == 1
        return next(batches).tolist()

    followers = torchmn.run_threads(save, 3)
    assert torchmn.run_threads(load, 3) == followers
    assert not caplog.messages
    assert torchmn.run_threads(load, 2) == [next(Batches(60, seed=50)).tolist()] * 2
    assert caplog.text.count("position of the iterator is not restored") == 1
    assert torchmn.run_threads(lambda comm: load(comm, from_rank=2), 2) == [followers[2]] * 2


def test_state_that_differed_between_ranks_needs_from_rank_on_another_number_of_ranks(tmp_path):
    def net(rank):
        model = filled(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), 0)
        model[1].running_mean.fill_(rank)
        return model

    def save(comm):
        create_multi_node_checkpointer("run", comm, tmp_path).save(1, model=net(comm.rank), extra={"loss": 2.5})

    def load(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
        model = net(7)
        assert checkpointer.maybe_load(model=model) == 1
        return model[1].running_mean[0].item()

    def load_elsewhere(comm):
        checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
        model = net(7)
        words = ("'model/1.running_mean'", "4 ranks", f"now there are {comm.size}", "from_rank=0")
        assert_refused(comm, lambda: checkpointer.maybe_load(model=model), *words, kind=CheckpointError)
        assert_refused(comm, lambda: checkpointer.maybe_load(model=model, from_rank=4), "from_rank in 0..3")
        assert model[1].running_mean[0] == 7
        assert checkpointer.maybe_load(model=model, from_rank=2) == 1
        assert checkpointer.extra == {"loss": 2.5}
        return model[1].running_mean[0].item()

    torchmn.run_threads(save, 4)
    assert torchmn.run_threads(load, 4) == [0, 1, 2, 3]
    assert torchmn.run_threads(load_elsewhere, 3) == [2, 2, 2]
    assert torchmn.run_threads(load_elsewhere, 6) == [2] * 6


@ranks(1, 3, on="threads")
def test_without_a_checkpoint_nothing_is_touched(comm, tmp_path, caplog):
    training = Training(comm)
    before = parameters(training)
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path / "new" / "directory")
    assert checkpointer.maybe_load(**training.parts) is None
    assert checkpointer.extra is None
    np.testing.assert_array_equal(parameters(training), before)
    assert not caplog.messages


@ranks(2, on="threads")
def test_newest_means_saved_last_and_a_step_can_be_requested(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    for step, value in ((10, "a"), (20, "b"), (15, "c"), (15, "d")):
        checkpointer.save(step, extra=value)
    assert (checkpointer.maybe_load(), checkpointer.extra) == (15, "d")
    assert (checkpointer.maybe_load(step=20), checkpointer.extra) == (20, "b")
    assert_refused(comm, lambda: checkpointer.maybe_load(step=11), "step 11", "[10, 15, 20]", kind=CheckpointError)


@pytest.mark.parametrize("size", [1, 3])
def test_a_model_alone_can_be_loaded_and_the_rest_is_logged(tmp_path, caplog, size):
    def save(comm):
        training = Training(comm)
        training.train(2)
        create_multi_node_checkpointer("run", comm, tmp_path).save(2, **training.parts)
        return parameters(training)

    def load(comm):
        training = Training(comm)
        create_multi_node_checkpointer("run", comm, tmp_path).maybe_load(model=training.model)
        return parameters(training)

    expected = torchmn.run_threads(save, 3)[0]
    np.testing.assert_array_equal(torchmn.run_threads(load, size), [expected] * size)
    assert "not loaded, because not requested: iterator, optimizer, scheduler" in caplog.text


@ranks(2, on="threads")
def test_loaded_state_does_not_depend_on_the_files(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    checkpointer.save(1, extra=torch.arange(100_000.0))
    checkpointer.maybe_load()
    comm.barrier()
    if comm.rank == 0:
        for file in tmp_path.glob("*/*.safetensors"):
            file.write_bytes(b"")
    comm.barrier()
    assert checkpointer.extra.equal(torch.arange(100_000.0))


OPTIMIZERS = [
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "NAdam", "RAdam"),
    *("RMSprop", "Rprop", "SGD"),
]


@ranks(2, on="threads")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(comm, tmp_path, kind):
    def begin():
        model = filled(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double(), 1)
        inner = getattr(torch.optim, kind)(model.parameters(), lr=0.03)
        return model, torchmn.create_multi_node_optimizer(inner, comm, model=model)

    def train(model, optimizer, steps):
        for step in steps:
            x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3) * (step + 1 + comm.rank)

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).cos().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    model, optimizer = begin()
    train(model, optimizer, range(4))
    checkpointer = create_multi_node_checkpointer(kind, comm, tmp_path)
    checkpointer.save(4, model=model, optimizer=optimizer)
    expected = train(model, optimizer, range(4, 12))
    model, optimizer = begin()
    assert checkpointer.maybe_load(model=model, optimizer=optimizer) == 4
    assert torch.equal(train(model, optimizer, range(4, 12)), expected)
