"""The same graph twice: as a chain over ranks, and as plain modules in one process, for the expected numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchmn.graph import MultiNodeChainList

WIDTH = 3
LEARNING_RATE = 0.01  # a large one makes chaos of the last digits


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


SHAPES = {
    "tensor": lambda h: h,
    "tuple": lambda h: (h, h.cos()),
    "list": lambda h: [h.sin(), (h * h,)],
    "dict": lambda h: {"a": h, 2: [h.cos(), {"c": h.tanh()}]},
    "namedtuple": lambda h: (Pair(h, h.exp()),),
    "with what has no gradient": lambda h: {"x": h, "positive": h > 0, "count": (h > 0).long(), "none": None, "n": 3},
    "with a detached one": lambda h: (h.detach(), h),
}


class Spec(NamedTuple):
    """A component: its rank, its edges, the shape of its result, and the arguments that it ignores."""

    rank: int
    rank_in: Any = None
    rank_out: Any = None
    shape: str = "tensor"
    ignores: tuple[int, ...] = ()


class Node(nn.Module):
    """tanh(W * (sum of all floats in the arguments, each weighed by its place) + b), in the shape of its spec."""

    def __init__(self, spec: Spec, seed: int):
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=generator, dtype=torch.float64))

    def forward(self, *arguments: Any) -> Any:
        rows = next((x.shape[:-1] for x in floats(arguments)), ())
        total = torch.zeros(*rows, WIDTH, dtype=torch.float64)
        for n, argument in enumerate(arguments):
            if n not in self.spec.ignores:
                for place, x in enumerate(floats(argument)):
                    total = total + (n + 1) * (0.5 + place) * x
        return SHAPES[self.spec.shape](torch.tanh(total @ self.weight + self.bias))


def floats(value: Any) -> list[Tensor]:
    """The floating-point tensors in any nesting of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [x for item in items for x in floats(item)]


def ends(ranks: int | Sequence[int] | None) -> list[int]:
    return [] if ranks is None else [ranks] if isinstance(ranks, int) else list(ranks)


def sources_of(specs: Sequence[Spec]) -> list[list[int]]:
    """Of which component each argument of each component is the result, by first-in first-out between two ranks."""
    writers = defaultdict(list)
    for n, spec in enumerate(specs):
        for rank in ends(spec.rank_out):
            writers[spec.rank, rank].append(n)
    read = defaultdict(int)
    sources = []
    for spec in specs:
        mine = []
        for rank in ends(spec.rank_in):
            mine.append(writers[rank, spec.rank][read[rank, spec.rank]])
            read[rank, spec.rank] += 1
        sources.append(mine)
    return sources


def run_in_one_process(specs: Sequence[Spec], nodes: Sequence[nn.Module], inputs: dict[int, tuple]) -> dict:
    """The outputs of each rank; a component runs when its arguments are there."""
    sources = sources_of(specs)
    results: dict[int, Any] = {}
    while len(results) < len(specs):
        before = len(results)
        for n, spec in enumerate(specs):
            if n not in results and all(source in results for source in sources[n]):
                values = inputs[spec.rank] if spec.rank_in is None else [results[source] for source in sources[n]]
                results[n] = nodes[n](*values)
        assert len(results) > before, "this graph cannot run"
    outputs = defaultdict(list)
    for n, spec in enumerate(specs):
        if spec.rank_out is None:
            outputs[spec.rank].append(results[n])
    return outputs


def loss_of(outputs: Any) -> Tensor:
    """A mean over the batch, as a user's loss would be."""
    return sum(((n + 1.0) * x.square().mean() for n, x in enumerate(floats(outputs))), torch.zeros(())).double()


def draw_inputs(specs: Sequence[Spec], seed: int, rows: int, arguments: int) -> dict[int, tuple]:
    generator = torch.Generator().manual_seed(seed)
    ranks = sorted({spec.rank for spec in specs if spec.rank_in is None})
    return {
        rank: tuple(
            torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
            for _ in range(arguments)
        )
        for rank in ranks
    }


class Step(NamedTuple):
    """What one process computes in a training step, by rank or by component."""

    outputs: dict[int, list[Any]]
    input_gradients: dict[int, list[Tensor]]
    parameter_gradients: list[dict[str, Tensor]]


_one_process: dict[str, list[Step]] = {}
_computing = Lock()


def train_in_one_process(specs: Sequence[Spec], iterations: int, rows: int, arguments: int, ignore: int) -> list[Step]:
    """All steps of the training; where ranks are threads, the first one computes them for all."""
    with _computing:
        key = repr((specs, iterations, rows, arguments, ignore))
        if key not in _one_process:
            _one_process.clear()
            nodes = [Node(spec, seed) for seed, spec in enumerate(specs)]
            optimizer = torch.optim.SGD(nn.ModuleList(nodes).parameters(), lr=LEARNING_RATE)
            steps = []
            for iteration in range(iterations):
                optimizer.zero_grad()
                inputs = draw_inputs(specs, iteration, rows, arguments)
                outputs = run_in_one_process(specs, nodes, inputs)
                used = [in_the_loss(values, ignore) for values in outputs.values()]
                sum(map(loss_of, used), torch.zeros(())).backward()
                by_rank = {rank: [gradient(x) for x in xs] for rank, xs in inputs.items()}
                by_node = [{name: gradient(p) for name, p in node.named_parameters()} for node in nodes]
                steps.append(Step(outputs, by_rank, by_node))
                optimizer.step()
            _one_process[key] = steps
        return _one_process[key]


def in_the_loss(outputs: list[Any], ignore: int) -> list[Any]:
    return outputs[min(ignore, len(outputs) - 1) :]


def gradient(x: Tensor) -> Tensor:
    """None counts as zeros, which a rank gets for a value that was not used."""
    return torch.zeros_like(x) if x.grad is None else x.grad.clone()


def assert_equal_to_one_process(
    comm: Any,
    specs: Sequence[Spec],
    *,
    iterations: int = 3,
    microbatches: int = 1,
    rows: int = 4,
    arguments: int = 1,
    ignore_outputs: int = 0,
) -> None:
    """Trains the chain as one process would: outputs and all gradients must agree in every step.

    `ignore_outputs`: so many of a rank's outputs, if it has more, take no part in the loss.
    """
    chain = MultiNodeChainList(comm, microbatches=microbatches)
    mine = {seed: Node(spec, seed) for seed, spec in enumerate(specs) if spec.rank == comm.rank}
    for node in mine.values():
        chain.add_link(node, node.spec.rank_in, node.spec.rank_out)
    optimizer = torch.optim.SGD(list(chain.parameters()) or [torch.zeros(())], lr=LEARNING_RATE)
    steps = train_in_one_process(specs, iterations, rows, arguments, ignore_outputs)
    for iteration, step in enumerate(steps):
        optimizer.zero_grad()
        inputs = draw_inputs(specs, iteration, rows, arguments).get(comm.rank, ())
        result = chain(*inputs)
        if comm.rank in step.outputs:
            expected = step.outputs[comm.rank]
            outputs = [result] if len(expected) == 1 else list(result)
            torch.testing.assert_close(outputs, expected, rtol=1e-10, atol=1e-12)
            loss_of(in_the_loss(outputs, ignore_outputs)).backward()
        else:
            assert result.shape == () and result.is_floating_point() and result == 0
            result.backward()
        for x, known in zip(inputs, step.input_gradients.get(comm.rank, ()), strict=True):
            assert_same(gradient(x), known, f"iteration {iteration}: input of rank {comm.rank}")
        for seed, node in mine.items():
            for name, parameter in node.named_parameters():
                known = step.parameter_gradients[seed][name]
                assert_same(gradient(parameter), known, f"iteration {iteration}: {name} of component {seed}")
        optimizer.step()


def assert_same(got: Tensor, expected: Tensor, what: str) -> None:
    if not torch.allclose(got, expected, rtol=1e-10, atol=1e-12):  # quicker; the other one finds the words
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=lambda text: f"{what}: {text}")
