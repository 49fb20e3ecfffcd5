"""State dicts hold global tensors: from any grid and mode to the plain model, and into any other grid and mode."""

from __future__ import annotations

import io
from math import prod

import pytest
import torch

import torchmn
from tests.nn.parts.parity import assert_close
from tests.parallel.training import PROBLEMS, Problem, tile_of
from torchmn.communicators.process_grid import ProcessGrid
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
def test_a_state_dict_travels_from_one_grid_to_another(here, there):
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


def test_a_parallel_model_is_not_pickled():
    def body(comm):
        _, model = on_grid(PROBLEMS["U-Net"], comm, "halopar", {"height": 2})
        with pytest.raises(ArgumentError, match=r"can not be pickled. Save torchmn\.full_state_dict\(model\)"):
            torch.save(model, io.BytesIO())

    torchmn.run_threads(body, 2, timeout=30)
