"""In which order a rank runs its components, and on which micro-batch: the same plan on every rank, without asking."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

from torchmn.graph.description import Graph


class Task(NamedTuple):
    """One component at work on one micro-batch. Tasks sort as a rank prefers them."""

    microbatch: int
    place: int  # of the component on its rank
    rank: int


def schedule(graph: Graph, microbatches: int) -> list[list[Task]]:
    """The tasks of each rank, in an order in which all of them can run if sends do not wait.

    The backward pass goes through it in reverse, which is a valid order again.
    """
    plan: list[list[Task]] = [[] for _ in range(graph.size)]
    for tasks in rounds(graph, microbatches):
        for task in tasks:
            plan[task.rank].append(task)
    return plan


def rounds(graph: Graph, microbatches: int) -> Iterator[list[Task]]:
    """The tasks that run at the same time, at most one on a rank, if every component lasts equally long.

    A rank never idles while one of its tasks could run; of several it takes the earliest micro-batch first, and then
    the component added first. On a line of ranks that is the order of GPipe. A component meets its micro-batches in
    order, so messages on an edge arrive in order too. Components of a cycle never come.
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
                follower = Task(task.microbatch, edge.target.place, edge.target.rank)
                waiting[follower] -= 1
                if not waiting[follower]:
                    heappush(ready[follower.rank], follower)
