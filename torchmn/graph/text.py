"""describe: the graph of a chain as text."""

from __future__ import annotations

from torchmn.graph.chain_list import MultiNodeChainList
from torchmn.graph.description import Component, Graph


def describe(chain: MultiNodeChainList) -> str:
    """Returns the graph of `chain` over all ranks, with its problems, as text on every rank.

    Args:
        chain: every rank must call this with its own.

    Returns:
        Text of several lines, the same on all ranks.
    """
    return as_text(chain.gather_graph())


def as_text(graph: Graph) -> str:
    """Returns `graph` as text: a line for each component, with the other end of each of its edges."""
    lines = [f"{len(graph.components)} components on {graph.size} ranks, {len(graph.edges)} edges"]
    for rank in range(graph.size):
        lines.append(f"rank {rank}" + ("" if graph.of_rank(rank) else ": no component, returns a delegate"))
        for component in graph.of_rank(rank):
            lines.append(f"  {component.place} {component.name}: {_sources(graph, component)} -> ")
            lines[-1] += _targets(graph, component)
    lines += [f"cannot run: {problem}" for problem in graph.problems]
    return "\n".join(lines)


def _sources(graph: Graph, component: Component) -> str:
    if component.rank_in is None:
        return "model input"
    found = {edge.argument: _end(edge.source, component) for edge in graph.incoming[component]}
    arguments = [found.get(n, f"rank {rank}, which sends nothing") for n, rank in enumerate(component.rank_in)]
    return ", ".join(arguments) or "nothing"


def _targets(graph: Graph, component: Component) -> str:
    if component.rank_out is None:
        return "model output"
    ends = [_end(edge.target, component) for edge in graph.outgoing[component]]
    connected = [edge.target.rank for edge in graph.outgoing[component]]
    for rank in component.rank_out:
        if rank in connected:
            connected.remove(rank)
        else:
            ends.append(f"rank {rank}, which takes nothing")
    return ", ".join(ends) or "nothing"


def _end(other: Component, component: Component) -> str:
    place = f"{other.place} {other.name}"
    return f"own {place}" if other.rank == component.rank else f"rank {other.rank}: {place}"
