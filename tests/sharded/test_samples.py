"""Functions along dim 0, where ranks along `data` have different samples: the numbers of one rank, or an error."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmn
from tests.sharded.parity import assert_parity
from torchmn import ParallelizeError, ProcessGrid, parallelize

BATCH, CHANNELS = 4, 3
MIXED: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: lambda x, name=name: getattr(x, name)(dim=0)
        for name in (
            *("sum", "mean", "prod", "amax", "amin", "argmax", "argmin", "any", "all", "std", "var", "norm", "median"),
            *("logsumexp", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "argsort", "nanmean"),
            *("max", "min", "cummax", "cummin", "diff", "unbind", "count_nonzero", "nansum", "unique"),
        )
    },
    "sum of all but one dim": lambda x: x.sum(tuple(range(x.dim() - 1))),
    "max of all": lambda x: x / x.max(),
    "norm of all": lambda x: x / x.norm(),
    "mean of all, with samples": lambda x: x - x.mean(),
    "deviation of all": lambda x: x / x.std(),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "topk": lambda x: x.topk(2, 0),
    "kthvalue": lambda x: x.kthvalue(2, 0),
    "quantile": lambda x: x.quantile(0.5, 0),
    "glu": lambda x: F.glu(x, 0),
    "softmin": lambda x: F.softmin(x, dim=0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "flip": lambda x: x.flip(0),
    "flip of two dims": lambda x: x.flip((0, 1)),
    "flipud": lambda x: x.flipud(),
    "roll": lambda x: x.roll(1, 0),
    "rot90": lambda x: x.rot90(),
    "gather": lambda x: x.gather(0, torch.zeros_like(x, dtype=torch.long)),
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 0])),
    "an int as index": lambda x: x[0],
    "a slice as index": lambda x: x[:1] * x,
    "a list as index": lambda x: x[[1, 0]],
    "select": lambda x: x.select(0, 0),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "chunk": lambda x: torch.add(*x.chunk(2)),
    "split": lambda x: x.split(1),
    "cat": lambda x: torch.cat([x, -x])[:1],
    "stack": lambda x: torch.stack([x, -x]).flip(1),
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1))[:1],
    "pad": lambda x: F.pad(x, (*[0, 0] * (x.dim() - 1), 1, 0)),
    "layer_norm": lambda x: F.layer_norm(x, tuple(x.shape)),
    "view": lambda x: x.reshape(x.shape[1], -1).cumsum(1),
    "matmul": lambda x: x.flatten(1).T @ x.flatten(1),
    "similarities": lambda x: x.flatten(1) @ x.flatten(1).T,
    "pairs": lambda x: x.flatten(1)[:, None] - x.flatten(1)[None],
    "permute": lambda x: x.transpose(0, 1).sum(1),
}
SEPARATE: dict[str, Callable[[Tensor], Any]] = {
    "along dim 1": lambda x: [x.sum(1), x.cumsum(1), x.sort(1).values, x.flip(1), x.softmax(1), x.roll(1, 1), x.std(1)],
    "elementwise": lambda x: x * torch.arange(float(x.shape[1])).view(-1, *[1] * (x.dim() - 2)).to(x) - x.relu(),
    "weights along dim 0": lambda x: x * torch.ones(x.shape[1], 2).softmax(0).sum().to(x),
    "joined dims": lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]).relu().reshape(x.shape),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
}
VECTORS_ONLY: dict[str, Callable[[Tensor], Any]] = {
    "one entry of each sample": lambda x: x[torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)],
    "two batches at once": lambda x: torch.cat([x, -x]).relu().chunk(2),
    "time first and back": lambda x: x.unsqueeze(1).transpose(0, 1).cumsum(0).transpose(0, 1),
}
PLACES = {
    "tiles": ({"data": 2, "height": 2}, "halodatapar", (BATCH, CHANNELS, 4, 3), nn.Conv2d(CHANNELS, CHANNELS, 1)),
    "cut channels": ({"data": 2, "height": 2}, "modelpar", (BATCH, CHANNELS, 4, 3), nn.Conv2d(CHANNELS, 4, 1)),
    "whole vectors": ({"data": 2}, "datapar", (BATCH, CHANNELS), nn.Linear(CHANNELS, 6)),
}


class Computed(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor], Any]):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


@pytest.mark.parametrize("place", PLACES)
def test_functions_that_combine_samples_raise_on_every_rank(place):
    sizes, mode, shape, layer = PLACES[place]

    def body(comm):
        grid = ProcessGrid(comm, **sizes)
        missing = []
        for name, function in MIXED.items():
            try:
                model = parallelize(Computed(layer, function), grid, mode, input_shape=shape[1:])
                model(torch.ones(2, *shape[1:]))
                missing.append(name)
            except ParallelizeError:
                pass
        return missing

    for missing in torchmn.run_threads(body, prod(sizes.values())):
        assert not missing, missing


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*SEPARATE, *VECTORS_ONLY])
def test_functions_of_each_sample_give_the_numbers_of_one_rank(name, place):
    sizes, mode, shape, layer = PLACES[place]
    if name in SEPARATE or place == "whole vectors":
        assert_parity(Computed(layer, {**SEPARATE, **VECTORS_ONLY}[name]), shape, sizes, mode=mode)


def test_a_loss_inside_of_the_model_is_that_of_this_ranks_samples():
    class WithLoss(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, F.cross_entropy(y, torch.zeros(len(y), dtype=torch.long)) + 0.1 * y.square().mean()

    net = WithLoss(3, 2)
    batch = torch.randn(4, 3)
    net(batch)[1].backward()

    def body(comm):
        model = parallelize(net, comm, "datapar")
        model(batch.chunk(2)[comm.rank])[1].backward()
        return comm.allreduce(model.weight.grad, "mean")

    for gradient in torchmn.run_threads(body, 2):
        torch.testing.assert_close(gradient, net.weight.grad)


def test_a_model_that_reads_values_or_communicates_is_not_traced_under_datapar():
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if x.sum().item() > 0 else 1)

    def body(comm):
        class Communicates(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                y = super().forward(x)
                return y - comm.allreduce(y.mean(0).detach(), "mean")

        x = torch.ones(2, 3)
        reads = parallelize(Reads(3, 2), comm, "datapar")(x)
        centered = parallelize(Communicates(3, 2), comm, "datapar")(x * (comm.rank + 1))
        return reads.shape, comm.allreduce(centered.sum()).item()

    for shape, total in torchmn.run_threads(body, 2):
        assert shape == (2, 2)
        assert abs(total) < 1e-5
