"""What ranks compare in the forwards after the first one, and that the numbers stay those of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from unittest.mock import patch

from torch import nn

from tests._worlds import ranks
from tests.parallel.training import tile_of
from tests.sharded.parity import assert_close, numbers
from torchmn import ProcessGrid
from torchmn.communicators.agreement import Agreement
from torchmn.communicators.repeated_operations import RepeatedOperations
from torchmn.parallel import parallelize


@contextmanager
def comparisons(rank: int) -> Iterator[list[str]]:
    """A list that gets the name of each operation that this rank compares with others."""
    names: list[str] = []
    fingerprint = Agreement._fingerprint

    def counting(agreement: Agreement) -> int:
        if agreement.group.rank == rank:
            names.append(agreement.operation)
        return fingerprint(agreement)

    with patch.object(Agreement, "_fingerprint", counting):
        yield names


def network() -> nn.Module:
    layers = [
        layer
        for channels in (1, 4, 4, 4, 4)
        for layer in (nn.Conv2d(channels, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).double()


@ranks(2)
def test_after_the_first_forward_ranks_compare_at_most_three_times(comm):
    net = network()
    comm.bcast_data(net)
    serial, grid = deepcopy(net), ProcessGrid(comm, height=2)
    model, counts = parallelize(net, grid, "halopar", input_shape=(1, 8, 8)), []
    for step in range(6):
        for each in (serial, model):
            each[4].train(step < 3)  # a norm that is frozen later, on all ranks
        x = numbers((3, 1, 8, 8), step)
        comm.barrier()
        with comparisons(grid.tiles.rank) as compared:
            result = model(tile_of(x, grid))
        comm.barrier()
        counts.append(len(compared))
        assert_close(result, serial(x), f"step {step}", 1e-10)
        for name, buffer in serial.named_buffers():
            assert_close(model.get_buffer(name), buffer, name, 1e-10)
    assert counts[0] > 5, counts
    assert counts[1] <= 3 and counts[2] <= 3, counts
    assert counts[4] <= 3 and counts[5] <= 3, counts


@ranks(4, on="threads")
def test_replicas_with_other_numbers_of_samples_have_the_statistics_of_all(comm):
    net = network()
    comm.bcast_data(net)
    serial, grid = deepcopy(net), ProcessGrid(comm, data=2, height=2)
    model = parallelize(net, grid, "halodatapar", input_shape=(1, 8, 8))
    for step, sizes in enumerate([(3, 3), (3, 3), (2, 4), (2, 4), (4, 2), (3, 3)]):
        x = numbers((6, 1, 8, 8), step)
        mine = x.split(sizes)[grid.place["data"]]
        expected = serial(x).split(sizes)[grid.place["data"]]
        assert_close(model(tile_of(mine, grid)), expected, f"step {step}", 1e-10)


def test_what_differs_from_the_record_is_compared_with_all_that_follows():
    inner, outer = object(), object()
    operations = RepeatedOperations(inner)

    def run(*keys: str, known: bool) -> list[bool]:
        operations.known = known
        with operations:
            return [operations.repeats(outer if key == "norm" else inner, key) for key in keys]

    assert operations.number == 0
    assert run("halo", "norm", "halo", known=False) == [False] * 3
    first, outer_number = operations.number, operations.outer_number
    assert first and outer_number
    assert run("halo", "norm", "halo", known=True) == [True] * 3
    assert run("halo", "norm", "halo", known=False) == [False] * 3  # another rank has another record
    assert operations.number == first
    assert run("halo", "halo", "norm", "halo", known=True) == [True, False, False, False]
    assert operations.number != first and operations.outer_number == outer_number
    assert run("halo", known=True) == [True]
    assert run("halo", "halo", known=True) == [True, False]
    try:
        run("halo", "norm", known=True)
        with operations:
            raise ValueError
    except ValueError:
        assert operations.number == operations.outer_number == 0
