"""A profile by torch.profiler contains what a rank communicates, as named ranges."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

import torchmn

NET = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, 3))
HALOPAR_STEP = {
    "torchmn::agreement",
    "torchmn::halo_exchange",
    "torchmn::optimizer step",
    "torchmn::gradient mean",
}


def names_of_a_step(options):
    """The ranges of ours on rank 0 of two, each with its number of calls and seconds."""

    def train(comm):
        grid = torchmn.ProcessGrid(comm, height=2)
        model = torchmn.parallelize(NET, grid, mode="halopar")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torchmn.create_multi_node_optimizer(optimizer, grid, model=model, **options)
        tiles = torchmn.data.scatter_regions((torch.ones(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)), grid)
        x, t = (torch.stack(column) for column in zip(*tiles, strict=True))
        # Kineto records one profile per process, so one thread has it.
        with profile(activities=[ProfilerActivity.CPU]) if comm.rank == 0 else nullcontext() as recorded:
            cross_entropy(model(x), t).backward()
            optimizer.step()
        return recorded and recorded.key_averages()

    averages = torchmn.run_threads(train, 2)[0] or ()
    return {average.key: average for average in averages}


def test_a_profile_of_a_halopar_step_contains_its_communication():
    averages = names_of_a_step({})
    assert averages.keys() >= HALOPAR_STEP | {"Optimizer.step#SGD.step"}
    assert averages["torchmn::halo_exchange"].cpu_time_total > 0
    assert averages["torchmn::agreement"].count > 2


def test_the_wait_for_gradients_that_are_averaged_during_backward_is_a_range_too():
    assert "torchmn::gradient mean in the background" in names_of_a_step({"overlap": True})


def test_messages_between_two_ranks_are_ranges():
    def work(comm):
        with profile(activities=[ProfilerActivity.CPU]) if comm.rank == 0 else nullcontext() as recorded:
            comm.send(torch.ones(2), 1 - comm.rank)
            comm.recv(1 - comm.rank)
            with pytest.raises(torchmn.ArgumentError):  # ranges end with their operation, also if it raises
                comm.allreduce("not a tensor")
            comm.barrier()
        return recorded and [each.key for each in recorded.key_averages()]

    names = torchmn.run_threads(work, 2)[0]
    assert {"torchmn::send", "torchmn::recv", "torchmn::allreduce", "torchmn::barrier"} <= set(names)
