"""The graph of a MultiNodeChainList over all ranks: its components, edges and problems.

Pure data: ranks gather their components once, and each computes the same graph without further communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Component:
    """A module on a rank, and the ranks that it receives from and sends to.

    Attributes:
        place: number on its rank, in the order of add_link.
        name: of its class.
        rank_in: ranks of its arguments; None for the arguments of the model.
        rank_out: ranks that its result is sent to; None for an output of the model.
    """

    rank: int
    place: int
    name: str
    rank_in: tuple[int, ...] | None = None
    rank_out: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}'s component {self.place} ({self.name})"


@dataclass(frozen=True)
class GraphEdge:
    """The result of `source` becomes argument number `argument` of `target`."""

    number: int  # the same on every rank, for the tag of its messages
    source: Component
    target: Component
    argument: int

    @property
    def crosses_ranks(self) -> bool:
        return self.source.rank != self.target.rank


@dataclass(frozen=True)
class Graph:
    """The components of all ranks in rank order, their edges, and the problems that prevent running them."""

    size: int
    components: tuple[Component, ...]
    edges: tuple[GraphEdge, ...]
    problems: tuple[str, ...] = ()
    incoming: dict[Component, list[GraphEdge]] = field(default_factory=dict, compare=False, repr=False)
    outgoing: dict[Component, list[GraphEdge]] = field(default_factory=dict, compare=False, repr=False)

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
        """Returns the components on `rank`, in the order in which they were added."""
        return [component for component in self.components if component.rank == rank]


def connect(components: Sequence[Component], size: int) -> Graph:
    """Returns the graph of `components`: the n-th value a rank sends to another is the n-th that one receives from it.

    Never raises: what prevents running is in `problems`, one sentence each.
    """
    problems = [_out_of_range(component, size) for component in components]
    if not components:
        problems.append("it has no component on any rank: add some with add_link")
    sent: dict[tuple[int, int], list[Component]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[Component, int]]] = defaultdict(list)
    for component in components:
        for rank in component.rank_out or ():
            sent[component.rank, rank].append(component)
        for argument, rank in enumerate(component.rank_in or ()):
            received[rank, component.rank].append((component, argument))
    ends = []
    for pair in sorted(sent.keys() | received.keys()):
        if not all(0 <= rank < size for rank in pair):
            continue
        problems.append(_unmatched(*pair, sent[pair], received[pair]))
        ends += zip(sent[pair], received[pair], strict=False)
    edges = tuple(GraphEdge(number, source, *target) for number, (source, target) in enumerate(ends))
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
    source: int, target: int, sent: Sequence[Component], received: Sequence[tuple[Component, int]]
) -> str | None:
    if len(sent) == len(received):
        return None
    sources, targets = _places(sent), _places([component for component, _ in received])
    if source == target:
        text = f"rank {source} keeps a value for itself {_times(sent)} (rank_out={source}: {sources}) but takes one "
        text += f"from itself {_times(received)} (rank_in={source}: {targets})"
    else:
        text = f"rank {source} sends to rank {target} {_times(sent)} (rank_out={target}: {sources}) but rank {target} "
        text += f"receives from rank {source} {_times(received)} (rank_in={source}: {targets})"
    fewer_sent = len(sent) < len(received)
    missing = f"rank_out={target} on rank {source}" if fewer_sent else f"rank_in={source} on rank {target}"
    return f"{text}: add the missing {missing}, or remove the surplus"


def _times(ends: Sequence[object]) -> str:
    return {0: "not at all", 1: "once"}.get(len(ends), f"{len(ends)} times")


def _places(components: Sequence[Component]) -> str:
    return ", ".join(f"component {component.place} ({component.name})" for component in components) or "none"


def _cycle(graph: Graph) -> str | None:
    """Returns a sentence with the components of a cycle, or None if there is none."""
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
    # Each remaining component waits for a remaining one, so following these edges must end in a cycle.
    path = [next(iter(waiting))]
    while path.count(path[-1]) == 1:
        path.append(next(edge.source for edge in graph.incoming[path[-1]] if edge.source in waiting))
    ring = path[path.index(path[-1]) :]
    return "a cycle can never run: " + ", which waits for ".join(map(str, ring)).replace(", which", "", 1)
