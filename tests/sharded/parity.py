"""Comparison of a module on one rank with the same module on a grid of ranks: outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import torchmn
from torchmn import Communicator, ProcessGrid
from torchmn.geometry import Interval, owned
from torchmn.nn import SlicedModule
from torchmn.parallel import parallelize
from torchmn.trees import leaves_of

AXES = ("depth", "height", "width")
GRIDS_2D = ((1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 3))


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@dataclass
class Run:
    """The results of a forward and a backward, as global tensors."""

    outputs: list[Tensor]
    input_gradient: Tensor | None
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def sizes_of(grid: Sequence[int] | dict[str, int]) -> dict[str, int]:
    """(2, 3) is height 2, width 3; (2, 1, 2) begins with depth, (3,) is width 3. A dict names its axes."""
    return dict(grid) if isinstance(grid, dict) else dict(zip(AXES[3 - len(grid) :], grid, strict=True))


def numbers(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers, the same on every rank."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_parity(
    module: nn.Module | Callable[[Tensor], Any],
    shape: Sequence[int],
    grid: Sequence[int] | dict[str, int] = (2, 2),
    *,
    mode: str | None = None,
    train: bool = True,
    x: Tensor | None = None,
    tolerance: float = 1e-10,
) -> None:
    """Fails unless outputs, gradients and buffers of `module` on a grid of threads equal those of one rank.

    shape: of the whole input, (batch, channel, *image); x: the input itself, where random numbers will not do
    """
    net = module if isinstance(module, nn.Module) else Applied(module)
    net = net.double() if x is None else net
    net.train(train)
    x = numbers(shape) if x is None else x
    sizes = sizes_of(grid)
    mode = mode or ("halodatapar" if sizes.get("data", 1) > 1 else "halopar")
    torch.manual_seed(5)
    expected = run_serially(deepcopy(net), x)
    torch.manual_seed(5)
    runs = torchmn.run_threads(lambda comm: run_on_grid(comm, net, x, sizes, mode), prod(sizes.values()))
    for rank, got in enumerate(runs):
        assert_same(got, expected, f"rank {rank} of {len(runs)} on {sizes}", tolerance)


def assert_same(got: Run, expected: Run, where: str, tolerance: float) -> None:
    """Fails with the name of a tensor unless two runs have the same results."""
    assert len(got.outputs) == len(expected.outputs), f"{where}: {len(got.outputs)} outputs"
    pairs: list[tuple[str, Tensor | None, Tensor | None]] = [("input gradient", *_both(got, expected))]
    for number, both in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        pairs.append((f"output {number}", *both))
    assert got.gradients.keys() == expected.gradients.keys() and got.buffers.keys() == expected.buffers.keys()
    pairs += [(f"gradient of {name}", got.gradients[name], g) for name, g in expected.gradients.items()]
    pairs += [(f"buffer {name}", got.buffers[name], buffer) for name, buffer in expected.buffers.items()]
    for name, ours, theirs in pairs:
        assert_close(ours, theirs, f"{where}: {name}", tolerance)


def _both(got: Run, expected: Run) -> tuple[Tensor | None, Tensor | None]:
    return got.input_gradient, expected.input_gradient


def assert_close(got: Tensor | None, expected: Tensor | None, name: str, tolerance: float) -> None:
    """Fails unless both are None, or equal in shape, dtype and, relative to the largest value, in values."""
    if got is None or expected is None:
        assert got is None and expected is None, f"{name}: got {got}, expected {expected}"
        return
    assert type(got) is Tensor, f"{name} is a {type(got).__name__}"
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), (
        f"{name}: got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    )
    got, expected = got.double(), expected.double()
    alike = (got == expected) | (got.isnan() & expected.isnan())  # infinities and NaN, where one rank has them too
    finite = expected[expected.isfinite()]
    scale = max(1.0, finite.abs().max().item() if finite.numel() else 0.0)
    error = torch.where(alike, torch.zeros_like(got), (got - expected).abs())
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= tolerance * scale, f"{name}: off by {worst:.3g}, of values up to {scale:.3g}"


def run_serially(net: nn.Module, x: Tensor) -> Run:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point())
    outputs = _backward(net(x))
    gradients = {name: p.grad for name, p in net.named_parameters()}
    return Run(outputs, x.grad, gradients, dict(net.named_buffers()))


def _backward(result: Any, samples: Interval | None = None, total: int = 0) -> list[Tensor]:
    """Runs backward of a loss with a different weight for every element of every output.

    samples, total: which of how many samples the outputs are, where each copy of the model has its own
    """
    outputs = leaves_of(Tensor, result)
    loss = None
    for seed, y in enumerate(outputs):
        if y.requires_grad:
            weights = numbers(y.shape if samples is None else (total, *y.shape[1:]), 100 + seed, y.dtype)
            weighted = (y * (weights if samples is None else weights[samples.as_slice()])).sum()
            loss = weighted if loss is None else loss + weighted
    if loss is not None:
        loss.backward()
    return [y.detach() for y in outputs]


def run_on_grid(comm: Communicator, net: nn.Module, x: Tensor, sizes: dict[str, int], mode: str) -> Run:
    """The same run on this rank's tile, with the results of all ranks joined."""
    grid = ProcessGrid(comm, **sizes)
    model = parallelize(net, grid, mode, input_shape=tuple(x.shape[1:]))
    samples = owned(len(x), sizes.get("data", 1), grid.place["data"])
    box = [samples, Interval(0, x.shape[1])]
    if mode.startswith("halo"):
        axes = grid.axes_of(x.dim() - 2)
        box += [owned(x.shape[2 + i], grid.sizes[a], grid.place[a]) for i, a in enumerate(axes)]
    slices = tuple(interval.as_slice() for interval in box)
    tile = x[slices].clone(memory_format=torch.preserve_format).requires_grad_(x.is_floating_point())
    several = grid.replicas.size > 1
    outputs = _backward(model(tile), *([samples, len(x)] if several else []))
    outputs = [torch.cat(grid.replicas.allgather(y)) if several else y for y in outputs]
    input_gradient = None
    if any(g is not None for g in comm.allgather_obj(tile.grad)):
        input_gradient = torch.zeros_like(x)
        for where, part in comm.allgather_obj((slices, tile.grad)):
            input_gradient[where] = part
    return Run(outputs, input_gradient, gradients_of(model, comm, grid), dict(model.named_buffers()))


def gradients_of(model: nn.Module, comm: Communicator, grid: ProcessGrid) -> dict[str, Tensor | None]:
    """Of every parameter: the mean over ranks, times the copies, because each copy's loss is that of its samples."""
    owners = {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        if isinstance(module, SlicedModule)
        for name in module.sliced_parameters
    }
    found: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            found[name] = None
        elif name in owners:
            module, short = owners[name]
            found[name] = module.gathered(short, grid.replicas.allreduce(p.grad))
        else:
            found[name] = comm.allreduce(p.grad, "mean") * grid.sizes["data"]
    return found
