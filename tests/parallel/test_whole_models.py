"""5 steps of SGD with momentum of whole models, in every mode, equal one rank."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

import torchmn
from tests._worlds import ranks
from tests.parallel.training import PROBLEMS, assert_trains_as_one_rank, serial_training

HALO = [{"height": 2}, {"width": 3}, {"height": 2, "width": 2}, {"height": 2, "width": 3}, {"height": 3, "width": 3}]
TILES_AND_DATA = [{"data": 2, "height": 2}, {"data": 2, "width": 3}, {"data": 3, "height": 2}]
PLACES: list[tuple[str, dict[str, int]]] = [
    *(("halopar", sizes) for sizes in HALO),
    *(("halodatapar", sizes) for sizes in TILES_AND_DATA),
    *(("datapar", {"data": size}) for size in (2, 3, 6)),
    *(("modelpar", {"width": size}) for size in (2, 3, 4, 6)),
    ("modelpar", {"data": 2, "width": 2}),
]
# The large ones at chosen places: a grid that leaves parts empty, one with data, one with slices.
FEW = [PLACES[2], PLACES[4], PLACES[5], PLACES[9], PLACES[12]]


def cases() -> Any:
    yield from (("LeNet", *place) for place in PLACES)
    yield from (("U-Net", *place) for place in PLACES[::2])
    for name in ("VGG", "ResNet-18", "MLP"):
        yield from ((name, *place) for place in FEW)
    yield from (("MLP", "modelpar", {"width": size}) for size in (2, 4, 9))


@pytest.mark.parametrize(("name", "mode", "sizes"), list(cases()), ids=lambda value: str(value).replace(" ", ""))
def test_training_on_threads_equals_one_rank(name, mode, sizes):
    serial_training(PROBLEMS[name])
    torchmn.run_threads(
        lambda comm: assert_trains_as_one_rank(comm, PROBLEMS[name], mode, **sizes), prod(sizes.values())
    )


@ranks(2, 3, 4, on="mpi", timeout=120)
@pytest.mark.parametrize("name", ["LeNet", "U-Net"])
def test_training_on_processes_equals_one_rank(comm, name):
    grids: dict[int, list[tuple[str, dict[str, int]]]] = {
        2: [("halopar", {"height": 2}), ("modelpar", {"width": 2}), ("datapar", {"data": 2})],
        3: [("halopar", {"width": 3}), ("modelpar", {"width": 3})],
        4: [("halopar", {"height": 2, "width": 2}), ("halodatapar", {"data": 2, "height": 2})],
    }
    for mode, sizes in grids[comm.size]:
        assert_trains_as_one_rank(comm, PROBLEMS[name], mode, **sizes)
