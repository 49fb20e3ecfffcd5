"""draw: the graph of a chain as a picture, with one lane per rank and time from left to right."""

from __future__ import annotations

from os import PathLike
from typing import Any

from torchmn.errors import TorchMNError
from torchmn.graph.chain_list import MultiNodeChainList
from torchmn.graph.description import Component, Graph
from torchmn.graph.schedule import rounds

_BOX_WIDTH, _BOX_HEIGHT = 0.6, 0.42


def draw(chain: MultiNodeChainList, path: str | PathLike[str]) -> None:
    """Writes a picture of the graph of `chain`; every rank must call it, rank 0 writes.

    Args:
        chain: its graph over all ranks is drawn, with its problems.
        path: a .png, .svg or .pdf file.

    Raises:
        TorchMNError: on every rank, if rank 0 cannot write the file, or has no matplotlib.
    """
    graph = chain.gather_graph()
    if chain.comm is not None:
        chain.comm.attempt(f"draw to {path}", lambda: draw_graph(graph, path), root=0, raises=TorchMNError)


def draw_graph(graph: Graph, path: str | PathLike[str]) -> None:
    """Writes a picture of `graph` to `path`."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TorchMNError("drawing needs matplotlib: pip install matplotlib") from None

    columns = columns_of(graph)
    width = 1 + max(columns.values(), default=0)
    figure = Figure(figsize=(2.2 * width + 2.0, 1.3 * graph.size + 0.8), layout="constrained")
    axes = figure.add_subplot()
    for rank in range(graph.size):
        axes.axhspan(rank - 0.48, rank + 0.48, color="#f2f4f7" if rank % 2 else "#e6ebf2", zorder=0)
    at = {component: (columns[component], component.rank) for component in graph.components}
    for edge in graph.edges:
        _arrow(axes, at[edge.source], at[edge.target], "#9a5b13" if edge.crosses_ranks else "#667085")
    for component, (x, y) in at.items():
        _box(axes, component, x, y)
    axes.set_xlim(-0.6, width - 0.4)
    axes.set_ylim(graph.size - 0.5, -0.5)
    axes.set_yticks(range(graph.size), [f"rank {rank}" for rank in range(graph.size)])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    if graph.problems:
        axes.set_title("cannot run: " + "\n".join(graph.problems), color="#b42318", fontsize=8, wrap=True)
    figure.savefig(path)


def columns_of(graph: Graph) -> dict[Component, int]:
    """Returns the column of each component: right of all that it waits for, one component per column and rank."""
    at = {(component.rank, component.place): component for component in graph.components}
    columns = {at[task.rank, task.place]: n for n, tasks in enumerate(rounds(graph, 1)) for task in tasks}
    for component in graph.components:  # of a cycle: they never run
        if component not in columns:
            taken = [column for other, column in columns.items() if other.rank == component.rank]
            columns[component] = 1 + max(taken, default=-1)
    return columns


def _box(axes: Any, component: Component, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    left, top = x - _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2
    shape = "round,pad=0,rounding_size=0.06"
    box = FancyBboxPatch((left, top), _BOX_WIDTH, _BOX_HEIGHT, shape, facecolor="white", edgecolor="#344054", zorder=3)
    axes.add_patch(box)
    axes.text(x, y, f"{component.place} {component.name}", ha="center", va="center", fontsize=8, zorder=4)
    if component.rank_in is None:
        axes.annotate("", (left, y), (left - 0.18, y), arrowprops=_ARROW)
        axes.text(left - 0.1, y - 0.1, "in", ha="center", va="center", fontsize=7)
    if component.rank_out is None:
        right = x + _BOX_WIDTH / 2
        axes.annotate("", (right + 0.18, y), (right, y), arrowprops=_ARROW)
        axes.text(right + 0.1, y - 0.1, "out", ha="center", va="center", fontsize=7)


_ARROW = {"arrowstyle": "-|>", "color": "#667085", "linewidth": 1.0}


def _arrow(axes: Any, source: tuple[float, float], target: tuple[float, float], color: str) -> None:
    start = source[0] + _BOX_WIDTH / 2, source[1]
    end = target[0] - _BOX_WIDTH / 2, target[1]
    # Curved, around the boxes between its ends.
    columns = target[0] - source[0]
    bend = 0.7 / columns if source[1] == target[1] and columns > 1 else 0.0
    shape = {**_ARROW, "color": color, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", end, start, arrowprops=shape, zorder=2)
