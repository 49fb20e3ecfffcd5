"""What each module of a parallel model keeps on a rank: a slice of its weights, or all of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from torchmn.errors import ArgumentError
from torchmn.nn.layers.slices import SlicedModule

_LEAST_SHARE = 0.01  # of the weights: less is not worth a message
_SHOWN = 5


@dataclass(frozen=True)
class SummaryRow:
    """A module that has weights itself, not counting those of its submodules."""

    name: str
    kind: str  # its class
    ranks: int  # that share the weights; 1 where every rank has all
    weights: int  # of the whole module
    share: float  # of the weights of the model
    has_matrix: bool = False  # whether one of the parameters has two dims or more, unlike biases and norms

    @property
    def kept(self) -> str:
        """How the weights are kept, in words."""
        return f"sharded over {self.ranks} ranks" if self.ranks > 1 else "replicated on every rank"


@dataclass(frozen=True)
class ParallelSummary:
    """How the weights of a parallel model are kept; `str` gives a table."""

    mode: str
    rows: tuple[SummaryRow, ...]

    @property
    def weights(self) -> int:
        """The number of weights of the whole model."""
        return sum(row.weights for row in self.rows)

    @property
    def replicated(self) -> tuple[SummaryRow, ...]:
        """The modules whose weights every rank has."""
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
    """How each module of a parallel model keeps its weights: cut over ranks, or whole on every rank.

    It does not communicate, and is the same on every rank. A module is sharded if its weight is; its bias may still be
    whole. A parameter that several modules share counts for the first of them.

    Args:
        model: what `torchmn.parallelize` returned, in any mode.

    Returns:
        A summary with one row for each module that has parameters itself; `print` shows it as a table.

    Raises:
        ArgumentError: if the model is not parallel.
    """
    parallelism = getattr(model, "parallelism", None)
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
            cut = isinstance(module, SlicedModule) and any(key in module.cut_parameters for key in parameters)
            matrix = any(len(shape) > 1 for shape in shapes)
            ranks = parallelism.grid.tiles.size if cut else 1
            found.append(SummaryRow(name, type(module).__name__, ranks, sum(map(prod, shapes)), 0.0, matrix))
    total = sum(row.weights for row in found) or 1
    return ParallelSummary(parallelism.mode, tuple(replace(row, share=row.weights / total) for row in found))


def _global_shape(module: nn.Module, key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the parameter of which this rank may hold a slice."""
    if not isinstance(module, SlicedModule) or key not in module.cut_parameters:
        return shape
    dim, share = module.cut_parameters[key]
    extent = sum(len(share(tile)) for tile in range(module.grid.tiles.size))
    return (*shape[:dim], extent, *shape[dim + 1 :])


def warn_of_whole_modules(model: nn.Module) -> None:
    """On rank 0, say which modules of a modelpar model have weight matrices that no rule cuts.

    The other modes do not promise to cut weights, and biases and norms are small.
    """
    grid = model.parallelism.grid  # type: ignore[union-attr]
    if model.parallelism.mode != "modelpar" or grid.tiles.size == 1 or grid.comm.rank != 0:  # type: ignore[union-attr]
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
        "attention and what they contain are not cut. The numbers are right, but each rank holds and computes all of "
        "these: print(torchmn.parallel_summary(model)) shows every module",
        stacklevel=3,  # who called parallelize
    )
