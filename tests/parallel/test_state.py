"""State dicts hold global tensors: from any grid and mode to the plain model, and into any other grid and mode."""

from __future__ import annotations

import io
from copy import deepcopy
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchmn
from tests.parallel.training import PROBLEMS, Problem, optimizer_of, tile_of
from tests.sharded.parity import assert_close
from torchmn import ProcessGrid
from torchmn.errors import ArgumentError, ParallelizeError
from torchmn.parallel import full_state_dict, parallelize

PLACES = [
    ("halopar", {"height": 2, "width": 2}),
    ("modelpar", {"width": 3}),
    ("halodatapar", {"data": 2, "width": 2}),
    ("datapar", {"data": 2}),
]


def other_model(problem: Problem) -> torch.nn.Module:
    """The model with other parameters and statistics than it has first."""
    model = problem.model()
    with torch.no_grad():
        for number, (_, x) in enumerate(sorted(model.state_dict().items())):
            if x.is_floating_point():
                x.mul_(0.5).add_(
                    torch.linspace(0.1, 0.4, x.numel(), dtype=x.dtype).view(x.shape) * (1 + number % 3) / 3
                )
    return model


def same_state(got, expected):
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert_close(got[key].detach(), value.detach(), key, 0.0)


def on_grid(problem, comm, mode, sizes):
    grid = ProcessGrid(comm, **sizes)
    return grid, parallelize(problem.model(), grid, mode, input_shape=problem.shape)


@pytest.mark.parametrize("there", PLACES, ids=str)
@pytest.mark.parametrize("here", PLACES, ids=str)
def test_a_state_dict_loads_on_another_grid(here, there):
    problem = PROBLEMS["VGG"]  # batch statistics, an image that becomes a vector, Linears in a pair
    expected = other_model(problem).state_dict()

    def saves(comm):
        _, model = on_grid(problem, comm, *here)
        model.load_state_dict(expected)  # global tensors: each rank takes its part
        return full_state_dict(model)

    saved = torchmn.run_threads(saves, prod(here[1].values()))
    for state in saved:
        same_state(state, expected)
    plain = problem.model()
    plain.load_state_dict(saved[-1])
    same_state(plain.state_dict(), expected)

    x, _ = problem.batch(0)
    outputs = plain.eval()(x)

    def loads(comm):
        grid, model = on_grid(problem, comm, *there)
        model.load_state_dict(saved[0])
        same_state(full_state_dict(model), expected)
        return model.eval()(tile_of(x, grid) if there[0].startswith("halo") else x).detach()

    for got in torchmn.run_threads(loads, prod(there[1].values())):
        assert_close(got, outputs.detach(), "output", 1e-10)


def test_a_state_dict_of_another_model_is_an_error():
    def body(comm):
        _, model = on_grid(PROBLEMS["LeNet"], comm, "halopar", {"height": 2})
        wrong = dict(PROBLEMS["LeNet"].model().state_dict())
        wrong["fc1.weight"] = torch.zeros(40, 399, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"fc1\.weight"):
            model.load_state_dict(wrong)

    torchmn.run_threads(body, 2)


@pytest.mark.parametrize("mode", ["halopar", "modelpar"])
def test_the_slices_of_another_rank_are_not_loaded(mode):
    def body(comm):
        _, model = on_grid(PROBLEMS["LeNet"], comm, mode, {"height": 2})
        file = io.BytesIO()
        torch.save(model.state_dict(), file)  # as a script does on rank 0, to load it on all
        mine = torch.load(io.BytesIO(file.getvalue()))
        theirs = torch.load(io.BytesIO(comm.bcast_obj(file.getvalue())))
        expected = full_state_dict(model)
        model.load_state_dict(mine)
        same_state(full_state_dict(model), expected)
        if comm.rank == 0:
            model.load_state_dict(theirs)
            return
        with pytest.raises(
            ParallelizeError, match=r"slices of tile rank 0 of 2, and this is tile rank 1 of 2.*full_state"
        ):
            model.load_state_dict(theirs)

    torchmn.run_threads(body, 2, timeout=30)


@pytest.mark.parametrize(("mode", "sizes"), PLACES, ids=str)
def test_a_parallel_model_is_not_pickled(mode, sizes):
    def body(comm):
        _, model = on_grid(PROBLEMS["VGG"], comm, mode, sizes)
        with pytest.raises(ArgumentError, match=r"cannot be pickled\. Save .*torchmn\.full_state_dict\(model\)"):
            torch.save(model, io.BytesIO())

    torchmn.run_threads(body, prod(sizes.values()), timeout=30)


def no_random_numbers() -> nn.Module:
    head = [nn.Flatten(), nn.Linear(4 * 9 * 7, 8), nn.ReLU(), nn.Linear(8, 10)]
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), *head)


@pytest.mark.parametrize(("mode", "sizes"), PLACES, ids=str)
def test_a_deep_copy_computes_the_same_and_is_trained_independently(mode, sizes):
    problem = Problem(no_random_numbers, "no random numbers", (2, 9, 7))

    def body(comm):
        grid, model = on_grid(problem, comm, mode, sizes)
        twin = deepcopy(model)
        x, y = problem.batch(0)
        x = tile_of(x, grid) if mode.startswith("halo") else x
        before = deepcopy(full_state_dict(model))
        optimizer = torchmn.create_multi_node_optimizer(optimizer_of(twin), grid, model=twin)
        F.cross_entropy(twin(x), y).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.step()
        same_state(full_state_dict(model), before)
        # The first one, once it has learned the same, is what its copy is: also in what ranks did for one another.
        optimizer = torchmn.create_multi_node_optimizer(optimizer_of(model), grid, model=model)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        learned = full_state_dict(twin)
        same_state(full_state_dict(model), learned)
        assert not torch.equal(learned["0.weight"], before["0.weight"])

    torchmn.run_threads(body, prod(sizes.values()), timeout=30)
