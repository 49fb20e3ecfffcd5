"""Optimizers of parallel models: only multi-node optimizers may step, and samples count once."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchmn
from tests.parallel.training import PROBLEMS, optimizer_of, tile_of
from tests.sharded.parity import assert_close, numbers
from torchmn import ProcessGrid, clip_grad_norm_, functions
from torchmn.errors import ArgumentError, ParallelizeError
from torchmn.parallel import full_state_dict, parallelize

SHAPE = (3, 8, 7)


def small() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*net, nn.Flatten(), nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def data(samples: int, seed: int = 0):
    return numbers((samples, *SHAPE), seed), numbers((samples,), seed + 9).mul(10).long().abs() % 5


def same_state(model, expected, tolerance=1e-9):
    state = full_state_dict(model)
    for key, value in expected.state_dict().items():
        assert_close(state[key].detach(), value.detach(), key, tolerance)


@pytest.mark.guard("plain_optimizer")
@pytest.mark.parametrize(
    ("mode", "sizes"), [("halopar", {"height": 2}), ("datapar", {"data": 2}), ("modelpar", {"width": 2})]
)
def test_a_plain_optimizer_of_a_parallel_model_is_refused(mode, sizes):
    net = small()
    before = deepcopy(net.state_dict())

    def body(comm):
        grid = ProcessGrid(comm, **sizes)
        model = parallelize(net, grid, mode, input_shape=SHAPE)
        optimizer = optimizer_of(model)
        x, y = data(4)
        F.cross_entropy(model(tile_of(x, grid) if mode == "halopar" else x), y).backward()
        with pytest.raises(ParallelizeError, match=r"SGD\.step.*create_multi_node_optimizer"):
            optimizer.step()
        for key, value in full_state_dict(model).items():
            if "running" not in key and "tracked" not in key:
                assert_close(value.detach(), before[key], key, 0.0)
        torchmn.create_multi_node_optimizer(optimizer, grid, model=model).step()

    torchmn.run_threads(body, 2)


def test_a_plain_optimizer_may_step_where_there_is_one_rank_or_another_model():
    net = small()

    def body(comm):
        model = parallelize(net, ProcessGrid(comm), "halopar", input_shape=SHAPE)
        x, y = data(4)
        F.cross_entropy(model(x), y).backward()
        optimizer_of(model).step()
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        optimizer_of(other).step()

    torchmn.run_threads(body, 1)


@pytest.mark.parametrize("sizes", [{"data": 2, "height": 2}, {"data": 3}, {"data": 3, "width": 2}], ids=str)
def test_unequal_micro_batches_weigh_as_many_samples_as_they_have(sizes):
    """7 samples over 2 or 3 copies: each sample counts once, through batch norm too."""
    net = small()
    serial, x_y = deepcopy(net), [data(7, step) for step in range(3)]
    optimizer = optimizer_of(serial)
    for x, y in x_y:
        optimizer.zero_grad()
        F.cross_entropy(serial(x), y).backward()
        optimizer.step()

    def body(comm):
        grid = ProcessGrid(comm, **sizes)
        model = parallelize(net, grid, "halodatapar" if len(sizes) > 1 else "datapar", input_shape=SHAPE)
        optimizer = torchmn.create_multi_node_optimizer(optimizer_of(model), grid, model=model)
        starts = {2: [0, 2, 7], 3: [0, 4, 5, 7]}[sizes["data"]]
        mine = slice(*starts[grid.place["data"] :][:2])
        for x, y in x_y:
            tile, labels = tile_of(x[mine], grid), y[mine]
            optimizer.zero_grad()
            optimizer.weigh(F.cross_entropy(model(tile), labels), len(labels)).backward()
            optimizer.step()
        same_state(model, serial)

    torchmn.run_threads(body, torch.Size(sizes.values()).numel())


@pytest.mark.parametrize(
    ("mode", "sizes"), [("halopar", {"height": 2, "width": 2}), ("halodatapar", {"data": 2, "width": 2})]
)
def test_gradients_add_up_over_several_backwards(mode, sizes):
    net = small()
    serial, parts = deepcopy(net), [data(4, step) for step in range(3)]
    optimizer = optimizer_of(serial)
    for x, y in parts:
        (F.cross_entropy(serial(x), y) / len(parts)).backward()
    optimizer.step()

    def body(comm):
        grid = ProcessGrid(comm, **sizes)
        model = parallelize(net, grid, mode, input_shape=SHAPE)
        optimizer = torchmn.create_multi_node_optimizer(optimizer_of(model), grid, model=model)
        copies = sizes.get("data", 1)
        for x, y in parts:
            mine = slice(grid.place["data"] * 4 // copies, (grid.place["data"] + 1) * 4 // copies)
            with optimizer.no_sync():
                (F.cross_entropy(model(tile_of(x[mine], grid)), y[mine]) / len(parts)).backward()
        optimizer.step()
        same_state(model, serial)

    torchmn.run_threads(body, 4)


@pytest.mark.parametrize("sizes", [{"height": 2, "width": 2}, {"height": 3}, {"data": 2, "height": 2}], ids=str)
def test_a_dense_output_stays_cut_and_its_loss_counts_once(sizes):
    problem = PROBLEMS["U-Net"]
    serial = problem.model()
    x, y = problem.batch(0)
    optimizer = optimizer_of(serial)
    expected = F.cross_entropy(serial(x), y)
    expected.backward()
    optimizer.step()

    def body(comm):
        grid = ProcessGrid(comm, **sizes)
        mode = "halodatapar" if "data" in sizes else "halopar"
        model = parallelize(problem.model(), grid, mode, input_shape=problem.shape, output="tile")
        optimizer = torchmn.create_multi_node_optimizer(optimizer_of(model), grid, model=model)
        half = len(x) // sizes.get("data", 1)
        mine = slice(grid.place["data"] * half, (grid.place["data"] + 1) * half)
        labels = tile_of(y[mine].unsqueeze(1), grid).squeeze(1)
        output = model(tile_of(x[mine], grid))
        assert output.shape[2:] == labels.shape[1:]
        assert type(output) is torch.Tensor
        loss = functions.global_mean(F.cross_entropy(output, labels, reduction="none"), grid)
        assert abs(loss.item() - expected.item()) < 1e-10
        loss.backward()
        optimizer.step()
        same_state(model, serial)

    torchmn.run_threads(body, torch.Size(sizes.values()).numel())


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize(
    ("mode", "sizes"), [("halopar", {"height": 2, "width": 2}), ("modelpar", {"data": 2, "width": 2})]
)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(mode, sizes, norm_type):
    net, (x, y) = small(), data(4)
    serial = deepcopy(net)
    optimizer = optimizer_of(serial)
    F.cross_entropy(serial(x), y).backward()
    expected = nn.utils.clip_grad_norm_(serial.parameters(), 0.05, norm_type)
    optimizer.step()

    def body(comm):
        grid = ProcessGrid(comm, **sizes)
        model = parallelize(net, grid, mode, input_shape=SHAPE)
        optimizer = torchmn.create_multi_node_optimizer(optimizer_of(model), grid, model=model)
        mine = slice(2 * grid.place["data"], 2 * grid.place["data"] + 2) if "data" in sizes else slice(None)
        F.cross_entropy(model(tile_of(x[mine], grid) if mode == "halopar" else x[mine]), y[mine]).backward()
        optimizer.synchronize()
        norm = clip_grad_norm_(model, 0.05, norm_type)
        assert abs(norm.item() - expected.item()) < 1e-10
        optimizer.step()
        same_state(model, serial)

    torchmn.run_threads(body, 4)


@pytest.mark.guard("LocalClipping")
def test_torch_clips_slices_by_value_and_is_refused_where_it_would_take_their_norm():
    net, (x, y) = small(), data(4)
    serial = deepcopy(net)
    optimizer = optimizer_of(serial)
    F.cross_entropy(serial(x), y).backward()
    nn.utils.clip_grad_value_(serial.parameters(), 0.01)
    optimizer.step()

    def body(comm):
        model = parallelize(net, comm, "modelpar")
        optimizer = torchmn.create_multi_node_optimizer(optimizer_of(model), comm, model=model)
        F.cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        same_state(model, serial)
        F.cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        with pytest.raises(ParallelizeError, match=rf"rank {comm.rank} of 2: .*torchmn.clip_grad_norm_\(model"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    torchmn.run_threads(body, 2)


def _put_in_later(model: nn.Module) -> nn.Module:
    later = nn.Conv2d(3, 4, 3, padding=1).double()
    later.load_state_dict(model[0].state_dict())
    model[0] = later
    return model


def _assigned(model: nn.Module) -> nn.Module:
    state = {name: p.detach().clone() for name, p in full_state_dict(model).items()}
    model.load_state_dict(state, assign=True)
    return model


CHANGES = {
    "unfrozen later": lambda model: model,
    "a deep copy": deepcopy,
    "another layer in its place": _put_in_later,
    "other tensors as parameters": _assigned,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_parameters_that_come_later_are_combined_over_ranks_like_all_others(change):
    """Frozen in the first step, or put in before the optimizer was made."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(40, 3))
    net, x = net.double(), numbers((2, 3, 7, 6))
    frozen = change is CHANGES["unfrozen later"]

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for step in range(3):
            for p in model[0].parameters():
                p.requires_grad_(not frozen or step > 0)
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return full_state_dict(model)

    for p in net[0].parameters():
        p.requires_grad_(not frozen)
    serial = deepcopy(net)
    expected = train(serial, optimizer_of(serial), x)

    def body(comm):
        grid = ProcessGrid(comm, height=2, width=2)
        model = parallelize(net, grid, "halopar", input_shape=(3, 7, 6))
        tile = tile_of(x, grid)
        model(tile)
        model = change(model)
        optimizer = torchmn.create_multi_node_optimizer(optimizer_of(model), grid, model=model)
        return train(model, optimizer, tile)

    for got in torchmn.run_threads(body, 4):
        for name, values in expected.items():
            assert_close(got[name].detach(), values.detach(), name, 1e-9)


def test_an_optimizer_of_the_model_before_it_was_copied_is_refused():
    net = nn.Conv2d(3, 4, 3)

    def body(comm):
        model = parallelize(net, ProcessGrid(comm, height=2), "halopar")
        with pytest.raises(ArgumentError, match="none of the parameters"):
            torchmn.create_multi_node_optimizer(optimizer_of(net), comm, model=model)

    torchmn.run_threads(body, 2)
