"""The schedule of a graph: in which order each rank runs its components on which micro-batch.

Every rank computes the same schedule, without communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from torchmn.graph.description import Graph


class Task(NamedTuple):
    """One component on one micro-batch. A rank runs the smallest task that is ready."""

    microbatch: int
    place: int  # of the component on its rank
    rank: int


def schedule(graph: Graph, microbatches: int) -> list[list[Task]]:
    """Returns the tasks of each rank, in an order that does not deadlock if sends do not wait.

    Backward runs it in reverse, which is a valid order again.
    """
    plan: list[list[Task]] = [[] for _ in range(graph.size)]
    for tasks in rounds(graph, microbatches):
        for task in tasks:
            plan[task.rank].append(task)
    return plan


def rounds(graph: Graph, microbatches: int) -> Iterator[list[Task]]:
    """Yields the tasks that run at the same time, at most one per rank, if all components take equally long.

    A rank never idles while one of its tasks is ready; of several it takes the earliest micro-batch, then the component
    added first. For a pipeline that is the order of GPipe. A component gets its micro-batches in order, so messages of
    an edge arrive in order, too. Components of a cycle are left out.
    """
    at = {(component.rank, component.place): component for component in graph.components}
    waiting: dict[Task, int] = {}
    ready: list[list[Task]] = [[] for _ in range(graph.size)]
    for component in graph.components:
        for number in range(microbatches):
            task = Task(number, component.place, component.rank)
            waiting[task] = len(graph.incoming[component])
            if not waiting[task]:
                heappush(ready[task.rank], task)
    while any(ready):
        running = [heappop(tasks) for tasks in ready if tasks]
        yield running
        for task in running:
            for edge in graph.outgoing[at[task.rank, task.place]]:
                successor = Task(task.microbatch, edge.target.place, edge.target.rank)
                waiting[successor] -= 1
                if not waiting[successor]:
                    heappush(ready[successor.rank], successor)
