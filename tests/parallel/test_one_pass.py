"""The cost of parallelize grows linearly with the number of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchmn
from torchmn import Communicator


class Visits:
    """Counts the modules and parameters that walks over models have come by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.count = 0
        for name in ("named_modules", "_named_members"):
            monkeypatch.setattr(nn.Module, name, self._counting(getattr(nn.Module, name)))

    def _counting(self, walk: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def counting(*args: Any, **kwargs: Any) -> Iterator[Any]:
            for found in walk(*args, **kwargs):
                self.count += 1
                yield found

        return counting


def linears(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(layers)))


def convolutions(layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh()) for _ in range(layers)))


@pytest.mark.parametrize(
    ("make", "mode", "input_shape"),
    [
        (linears, "modelpar", (4,)),
        (linears, "modelpar", None),
        (convolutions, "modelpar", (4, 6, 6)),
        (convolutions, "halopar", (4, 6, 6)),
    ],
)
def test_twice_as_many_layers_are_visited_twice_as_often(
    make: Callable[[int], nn.Module], mode: str, input_shape: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = Visits(monkeypatch)

    def visited(layers: int) -> int:
        def run(comm: Communicator) -> None:
            model = torchmn.parallelize(make(layers), comm, mode, input_shape=input_shape)
            sliced = sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in make(layers).parameters())
            assert sliced == (mode == "modelpar")

        before = visits.count
        torchmn.run_threads(run, 2)
        return visits.count - before

    few, many = visited(10), visited(20)
    assert many <= 2 * few


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("more", [0, 3])
def test_an_optimizer_broadcasts_every_parameter_once(with_model: bool, more: int) -> None:
    def run(comm: Any) -> tuple[int, int, bool]:
        model = nn.Sequential(nn.Linear(300, 1000), nn.BatchNorm1d(1000))
        others = [nn.Parameter(torch.randn(7)) for _ in range(more)]
        sent: list[int] = []
        send = comm.buffers.bcast_tensor

        def counting(x: Any, *args: Any, **kwargs: Any) -> Any:
            received = send(x, *args, **kwargs)
            sent.append(received.nbytes)
            return received

        comm.buffers.bcast_tensor = counting
        sgd = torch.optim.SGD([*model.parameters(), *others], lr=0.1)
        torchmn.create_multi_node_optimizer(sgd, comm, model=model if with_model else None)
        tensors = [*model.parameters(), *(model.buffers() if with_model else ()), *others]
        same = all(torch.equal(*comm.allgather(x.detach())) for x in tensors)
        return sum(sent), sum(x.nbytes for x in tensors), same

    for sent, expected, same in torchmn.run_threads(run, 2):
        assert sent == expected
        assert same
