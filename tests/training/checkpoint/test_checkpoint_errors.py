"""Errors are raised on every rank before anything is written or loaded, and name the wrong object."""

from functools import partial

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.data import assert_refused
from tests.training.checkpoint.runs import Training, parameters
from torchmn.training.checkpoint import CheckpointError, create_multi_node_checkpointer


@ranks(1, 3, on="threads")
@ranks(3, on="mpi")
def test_a_directory_that_cannot_be_written_raises_at_creation(comm, tmp_path):
    file = tmp_path / "a file"
    file.write_text("mine")
    # No user can create a directory in /proc, not even root, for whom permissions do not count.
    for path in (file, file / "below", "/proc/torchmn"):
        mine = path if comm.rank == comm.size - 1 else tmp_path / "fine"
        call = lambda mine=mine: create_multi_node_checkpointer("run", comm, mine)  # noqa: E731
        words = ("create_multi_node_checkpointer", f"rank {comm.size - 1}", f"cannot write to the directory '{path}'")
        assert_refused(comm, call, *words, kind=CheckpointError)
    assert file.read_text() == "mine"
    if comm.size > 1:
        assert not list((tmp_path / "fine").iterdir()), "the probes are gone"


@ranks(2, on="threads")
def test_wrong_arguments_on_one_rank_are_an_error_on_all(comm, tmp_path):
    last = comm.rank == comm.size - 1
    create = lambda **other: create_multi_node_checkpointer(**{  # noqa: E731
        "name": "run", "comm": comm, "path": tmp_path, **(other if last else {})
    })  # fmt: skip
    for other in ({"keep": 0}, {"keep": -1}, {"keep": 2.0}, {"keep": True}, {"path": 3}, {"path": None}):
        assert_refused(comm, lambda other=other: create(**other), *other, "rank 1", kind=torchmn.ArgumentError)
    assert_refused(comm, lambda: create(name="other"), "name", kind=torchmn.MismatchError)
    assert_refused(comm, lambda: create(keep=3), "keep", kind=torchmn.MismatchError)
    checkpointer = create()
    for step in (-1, 1.5, None, True, "2"):
        assert_refused(comm, lambda step=step: checkpointer.save(step if last else 1), "step", "rank 1")
    assert_refused(comm, lambda: checkpointer.save(comm.rank), "step", kind=torchmn.MismatchError)
    model = nn.Linear(1, 1)
    named = {"model": model} if last else {"net": model}
    assert_refused(comm, lambda: checkpointer.save(1, **named), "model", "net", kind=torchmn.MismatchError)
    assert_refused(comm, lambda: checkpointer.save(1, epoch=3 if last else model), "epoch=", "state_dict", "extra={")
    assert_refused(comm, lambda: checkpointer.save(1, from_rank=model), "from_rank")
    assert_refused(comm, lambda: checkpointer.maybe_load(model=3 if last else model), "model=", "load_state_dict")
    assert_refused(comm, lambda: checkpointer.maybe_load(extra={}), "checkpointer.extra")
    assert_refused(comm, lambda: checkpointer.maybe_load(from_rank=-1 if last else 0), "from_rank", "rank 1")
    assert not list(tmp_path.iterdir())


def test_a_communicator_is_needed(tmp_path):
    with pytest.raises(torchmn.ArgumentError, match="comm"):
        create_multi_node_checkpointer("run", None, tmp_path)


@ranks(2, on="threads")
def test_a_model_that_does_not_fit_is_refused_by_its_tensors_and_nothing_is_loaded(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    checkpointer.save(1, model=nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    others = {
        "0.weight: saved (2, 3) torch.float32, expected here (2, 4) torch.float32": [
            nn.Linear(4, 2),
            nn.BatchNorm1d(2),
        ],
        "0.bias: in the checkpoint, but not here": [nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2)],
        "2.weight: not in the checkpoint": [nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)],
        "saved (2, 3) torch.float32, expected here (2, 3) torch.float64": [nn.Linear(3, 2).double(), nn.BatchNorm1d(2)],
    }
    for words, layers in others.items():
        model = nn.Sequential(*layers)
        if comm.rank == 0:
            model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))  # it fits here, but the other rank's does not
        before = {name: x.clone() for name, x in model.state_dict().items()}
        refused = lambda model=model: checkpointer.maybe_load(model=model)  # noqa: E731
        assert_refused(comm, refused, "rank 1 of 2", "'model'", words, kind=CheckpointError)
        assert all(x.equal(before[name]) for name, x in model.state_dict().items())


@ranks(2, on="threads")
def test_an_optimizer_of_other_parameters_is_refused(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    training = Training(comm)
    training.train(1)
    checkpointer.save(1, optimizer=training.optimizer)

    def other(*shapes):
        return torch.optim.Adam([torch.zeros(shape) for shape in shapes])

    words = "parameter 1 of group 0: saved (6,), expected here (5,)"
    for optimizer, text in (
        (other((6, 4), (5,), (2, 6), (2,)), words),
        (other((6, 4), (6,)), "parameters in groups: saved 4, expected here 2"),
    ):
        refused = lambda optimizer=optimizer: checkpointer.maybe_load(optimizer=optimizer)  # noqa: E731
        assert_refused(comm, refused, "'optimizer'", text, kind=CheckpointError)
        assert not optimizer.state


@ranks(2, on="threads")
def test_an_optimizer_of_another_kind_is_refused(comm, tmp_path):
    weights = [torch.zeros(3, requires_grad=True)]
    kinds = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop
    for kind in kinds:
        checkpointer = create_multi_node_checkpointer(kind.__name__, comm, tmp_path)
        saved = kind(weights, lr=0.1)
        torch.optim.lr_scheduler.OneCycleLR(saved, 0.1, total_steps=3)  # which adds keys to the groups
        checkpointer.save(1, optimizer=saved)
        assert checkpointer.maybe_load(optimizer=kind(weights, lr=0.5)) == 1
        for other in kinds:
            if other is not kind:
                refused = partial(checkpointer.maybe_load, optimizer=other(weights))
                assert_refused(comm, refused, "another kind of optimizer", kind=CheckpointError)


@ranks(2, on="threads")
def test_an_object_that_was_not_saved_is_refused_with_the_nearest_name(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    training = Training(comm)
    checkpointer.save(1, **training.parts)
    before = parameters(training)
    training.train(1)
    changed = parameters(training)
    call = lambda: checkpointer.maybe_load(model=training.model, optimiser=training.optimizer)  # noqa: E731
    assert_refused(comm, call, "no 'optimiser'", "Did you mean 'optimizer'?", kind=CheckpointError)
    assert (parameters(training) == changed).all() and not (changed == before).all()
    checkpointer.save(2)
    assert_refused(comm, lambda: checkpointer.maybe_load(model=training.model), "no 'model'", kind=CheckpointError)


class Moody:
    """An object whose methods raise on one rank."""

    def __init__(self, fails: str | None):
        self.fails = fails

    def state_dict(self) -> dict:
        if self.fails == "state_dict":
            raise KeyError("not today")
        return {}

    def load_state_dict(self, state: dict) -> None:
        if self.fails == "load_state_dict":
            raise RuntimeError("not today")


@ranks(3, on="threads")
def test_an_object_that_raises_on_one_rank_is_an_error_on_all(comm, tmp_path):
    checkpointer = create_multi_node_checkpointer("run", comm, tmp_path)
    for method in ("state_dict", "load_state_dict"):
        thing = Moody(method if comm.rank == 1 else None)
        if method == "state_dict":
            assert_refused(
                comm,
                lambda thing=thing: checkpointer.save(1, thing=thing),
                "rank 1 of 3",
                "thing: state_dict: KeyError",
                "not today",
            )
        else:
            checkpointer.save(1, thing=thing)
            words = ("rank 1 of 3", "thing", "RuntimeError: not today")
            assert_refused(comm, lambda thing=thing: checkpointer.maybe_load(thing=thing), *words, kind=CheckpointError)
