"""parallel_summary: which weights of a parallel model are sharded over ranks, and which are replicated."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from torchmn.errors import ArgumentError
from torchmn.nn.layers.sliced_module import SlicedModule
from torchmn.parallel.module import parallelism_of

_LEAST_SHARE = 0.01  # of the weights, for a warning
_SHOWN = 5  # modules in the warning


@dataclass(frozen=True)
class SummaryRow:
    """A module with weights, not counting those of its submodules.

    Attributes:
        name: of the module in the model.
        kind: its class.
        ranks: how many ranks share the weights; 1 if every rank has all of them.
        weights: the number of weights of the global module.
        share: of the weights of the model, from 0 to 1.
        has_matrix: whether one of the parameters has two or more dims, unlike biases and norms.
    """

    name: str
    kind: str
    ranks: int
    weights: int
    share: float
    has_matrix: bool = False

    @property
    def kept(self) -> str:
        """A description: "sharded over 4 ranks" or "replicated on every rank"."""
        return f"sharded over {self.ranks} ranks" if self.ranks > 1 else "replicated on every rank"


@dataclass(frozen=True)
class ParallelSummary:
    """Which weights of a parallel model are sharded, and which replicated; `str` returns a table.

    Attributes:
        mode: of the model.
        rows: one for each module with weights.
    """

    mode: str
    rows: tuple[SummaryRow, ...]

    @property
    def weights(self) -> int:
        """The number of weights of the whole model."""
        return sum(row.weights for row in self.rows)

    @property
    def replicated(self) -> tuple[SummaryRow, ...]:
        """The modules all of whose weights are on every rank."""
        return tuple(row for row in self.rows if row.ranks == 1)

    def __str__(self) -> str:
        header = ("module", "class", "its weights are", "weights", "share")
        lines = [(row.name, row.kind, row.kept, f"{row.weights:,}", f"{row.share:.1%}") for row in self.rows]
        replicated = sum(row.weights for row in self.replicated)
        share = replicated / self.weights if self.weights else 0.0
        lines.append(("all", "", f"{replicated:,} replicated ({share:.1%})", f"{self.weights:,}", ""))
        widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]
        aligned = [
            "  ".join(
                f"{text:{'<' if column < 3 else '>'}{widths[column]}}" for column, text in enumerate(line)
            ).rstrip()
            for line in (header, *lines)
        ]
        return "\n".join([f"mode {self.mode}", *aligned])


def parallel_summary(model: nn.Module) -> ParallelSummary:
    """Returns which modules of a parallel model have sharded weights, and which replicated ones.

    Does not communicate; the result is the same on every rank. A module is sharded if its weight is; its bias may be
    replicated. A parameter that several modules share counts for the first of them.

    Args:
        model: a model that `torchmn.parallelize` returned, in any mode.

    Returns:
        A summary with one row for each module that has parameters; `print` shows it as a table.

    Raises:
        ArgumentError: if the model is not parallel.
    """
    parallelism = parallelism_of(model)
    if not isinstance(model, nn.Module) or parallelism is None:
        raise ArgumentError(
            f"parallel_summary: expected a model that parallelize returned, got {type(model).__name__}: call "
            "torchmn.parallelize(model, grid, mode) first"
        )
    found: list[SummaryRow] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        parameters = {key: p for key, p in module.named_parameters(recurse=False) if id(p) not in seen}
        seen |= {id(p) for p in parameters.values()}
        if parameters:
            shapes = [_global_shape(module, key, tuple(p.shape)) for key, p in parameters.items()]
            cut = isinstance(module, SlicedModule) and any(key in module.sliced_parameters for key in parameters)
            matrix = any(len(shape) > 1 for shape in shapes)
            ranks = parallelism.grid.tiles.size if cut else 1
            found.append(SummaryRow(name, type(module).__name__, ranks, sum(map(prod, shapes)), 0.0, matrix))
    total = sum(row.weights for row in found) or 1
    return ParallelSummary(parallelism.mode, tuple(replace(row, share=row.weights / total) for row in found))


def _global_shape(module: nn.Module, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the global shape of a parameter of which this rank may hold a slice."""
    if not isinstance(module, SlicedModule) or key not in module.sliced_parameters:
        return shape
    dim, share = module.sliced_parameters[key]
    extent = sum(len(share(tile)) for tile in range(module.grid.tiles.size))
    return (*shape[:dim], extent, *shape[dim + 1 :])


def warn_of_replicated_modules(model: nn.Module) -> None:
    """Warns on rank 0 if weight matrices of a modelpar model stay replicated.

    Other modes do not shard all weights, and biases and norms are small.
    """
    parallelism = parallelism_of(model)
    if parallelism is None or parallelism.mode != "modelpar":
        return
    if parallelism.grid.tiles.size == 1 or parallelism.grid.comm.rank != 0:
        return
    whole = [row for row in parallel_summary(model).replicated if row.has_matrix]
    share = sum(row.share for row in whole)
    if share < _LEAST_SHARE:
        return
    largest = sorted(whole, key=lambda row: -row.weights)[:_SHOWN]
    names = [f"{row.name or 'the model'} ({row.kind}, {row.share:.1%})" for row in largest]
    more = [f"and {len(whole) - _SHOWN} more"] if len(whole) > _SHOWN else []
    warnings.warn(
        f"parallelize: {share:.1%} of the weights stay whole on every rank: {', '.join([*names, *more])}. modelpar "
        "cuts Linear, convolution and embedding layers that the model itself calls with a tensor; recurrent networks, "
        "attention and their submodules are not cut. Results are right, but each rank holds and computes all of "
        "these: print(torchmn.parallel_summary(model)) shows every module",
        stacklevel=3,  # the caller of parallelize
    )
