"""The graph of a MultiNodeChainList over all ranks: components, edges, and what is wrong with them.

Pure data: ranks gather their components once and each works out the same graph, without tensors and without messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Component:
    """A module on a rank: whose results are its arguments, and who gets its own.

    `rank_in=None`: the arguments are those of the model. `rank_out=None`: the result is an output of the model.
    """

    rank: int
    place: int  # in the order of add_link
    name: str
    rank_in: tuple[int, ...] | None = None
    rank_out: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}'s component {self.place} ({self.name})"


@dataclass(frozen=True)
class Edge:
    """The way of one result of `source` to one argument of `target`."""

    number: int  # the same on every rank, so that messages of different edges never meet
    source: Component
    target: Component
    argument: int

    @property
    def crosses_ranks(self) -> bool:
        return self.source.rank != self.target.rank


@dataclass(frozen=True)
class Graph:
    """Everything that all ranks know of the chain: its components in rank order, its edges, its problems."""

    size: int
    components: tuple[Component, ...]
    edges: tuple[Edge, ...]
    problems: tuple[str, ...] = ()
    incoming: dict[Component, list[Edge]] = field(default_factory=dict, compare=False, repr=False)
    outgoing: dict[Component, list[Edge]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for component in self.components:
            self.incoming[component] = []
            self.outgoing[component] = []
        for edge in self.edges:
            self.incoming[edge.target].append(edge)
            self.outgoing[edge.source].append(edge)
        for edges in self.incoming.values():
            edges.sort(key=lambda edge: edge.argument)

    def of_rank(self, rank: int) -> list[Component]:
        """The components on `rank`, in the order in which they were added."""
        return [component for component in self.components if component.rank == rank]


def connect(components: Sequence[Component], size: int) -> Graph:
    """The graph of `components`: the n-th result that a rank gives another is the n-th that this one takes from it.

    Never raises: what can not run is in `problems`, one sentence each.
    """
    problems = [_out_of_range(component, size) for component in components]
    if not components:
        problems.append("it has no component on any rank: add some with add_link")
    given: dict[tuple[int, int], list[Component]] = defaultdict(list)
    taken: dict[tuple[int, int], list[tuple[Component, int]]] = defaultdict(list)
    for component in components:
        for rank in component.rank_out or ():
            given[component.rank, rank].append(component)
        for argument, rank in enumerate(component.rank_in or ()):
            taken[rank, component.rank].append((component, argument))
    ends = []
    for pair in sorted(given.keys() | taken.keys()):
        if not all(0 <= rank < size for rank in pair):
            continue
        problems.append(_unmatched(*pair, given[pair], taken[pair]))
        ends += zip(given[pair], taken[pair], strict=False)
    edges = tuple(Edge(number, source, *taker) for number, (source, taker) in enumerate(ends))
    graph = Graph(size, tuple(components), edges)
    problems.append(_cycle(graph))
    return Graph(size, graph.components, edges, tuple(problem for problem in problems if problem))


def _out_of_range(component: Component, size: int) -> str | None:
    for name, ranks in (("rank_in", component.rank_in), ("rank_out", component.rank_out)):
        wrong = [rank for rank in ranks or () if not 0 <= rank < size]
        if wrong:
            peers = ", ".join(map(str, wrong))
            return f"{component} has {name} {peers}: expected ranks in 0..{size - 1}, of the communicator of this chain"
    return None


def _unmatched(
    source: int, target: int, given: Sequence[Component], taken: Sequence[tuple[Component, int]]
) -> str | None:
    if len(given) == len(taken):
        return None
    givers, takers = _places(given), _places([component for component, _ in taken])
    if source == target:
        text = f"rank {source} keeps a value for itself {_times(given)} (rank_out={source}: {givers}) but takes one "
        text += f"from itself {_times(taken)} (rank_in={source}: {takers})"
    else:
        text = f"rank {source} sends to rank {target} {_times(given)} (rank_out={target}: {givers}) but rank {target} "
        text += f"receives from rank {source} {_times(taken)} (rank_in={source}: {takers})"
    missing = f"rank_out={target} on rank {source}" if len(given) < len(taken) else f"rank_in={source} on rank {target}"
    return f"{text}: add the missing {missing}, or remove what is too much"


def _times(ends: Sequence[object]) -> str:
    return {0: "not at all", 1: "once"}.get(len(ends), f"{len(ends)} times")


def _places(components: Sequence[Component]) -> str:
    return ", ".join(f"component {component.place} ({component.name})" for component in components) or "none"


def _cycle(graph: Graph) -> str | None:
    """A sentence that walks once round a cycle, or None if every component gets its turn."""
    waiting = {component: len(graph.incoming[component]) for component in graph.components}
    ready = [component for component, count in waiting.items() if count == 0]
    while ready:
        component = ready.pop()
        del waiting[component]
        for edge in graph.outgoing[component]:
            waiting[edge.target] -= 1
            if waiting[edge.target] == 0:
                ready.append(edge.target)
    if not waiting:
        return None
    # Whoever is left waits for somebody who is left: going from one to the next must come round.
    path = [next(iter(waiting))]
    while path.count(path[-1]) == 1:
        path.append(next(edge.source for edge in graph.incoming[path[-1]] if edge.source in waiting))
    ring = path[path.index(path[-1]) :]
    return "a cycle can never run: " + ", which waits for ".join(map(str, ring)).replace(", which", "", 1)
