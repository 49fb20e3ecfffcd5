"""A chain's graph that all ranks agreed on, ready to run on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ComponentError, GraphError
from torchmn.functions.edges import edges_of
from torchmn.graph.channel import Channel
from torchmn.graph.description import Component, Edge, Graph, connect
from torchmn.graph.microbatches import cut, put_together
from torchmn.graph.payload import flatten
from torchmn.graph.schedule import Task, schedule


def with_its_place(error: Exception, component: Component, graph: Graph, arguments: Sequence[Any]) -> Exception:
    """The ComponentError to raise from `error`; `error` itself if it is of a class that somebody may want to catch.

    Python's own classes (RuntimeError of a wrong shape, TypeError of a missing argument) tell nothing of the chain. A
    class of anybody else is part of what its user writes, and TorchMN's name their place already.
    """
    if type(error).__module__ != "builtins":
        return error
    sources = [str(edge.source) for edge in graph.incoming[component]]
    where = f"rank {component.rank} of {graph.size}: component {component.place} ({component.name})"
    return ComponentError(
        f"{where} raised {type(error).__name__}: {error}\n{_called_with(component, sources, arguments)}"
    )


def _called_with(component: Component, sources: Sequence[str], arguments: Sequence[Any]) -> str:
    if component.rank_in is None:
        if not arguments:
            return (
                "It was called without arguments: its rank_in is None, so it gets what this rank calls the chain with, "
                "which was nothing. Pass the model's input on this rank, or add it with the rank_in it gets one from."
            )
        sources = ["the call of the chain on this rank"] * len(arguments)
    if not arguments:
        return "It was called without arguments: its rank_in is an empty list."
    got = [f"{_shapes(argument)} from {source}" for argument, source in zip(arguments, sources, strict=True)]
    return f"It was called with {len(got)} argument{'s' * (len(got) > 1)}: {'; '.join(got)}."


def _shapes(argument: Any) -> str:
    """What `argument` is, with the shape of every tensor in it."""
    tensors, _ = flatten(argument, keep_objects=True)
    if tensors and tensors[0] is not argument:
        return f"a {type(argument).__name__} with {', '.join(map(describe, tensors))}"
    return describe(argument)


def gather_graph(components: Sequence[Component], comm: Communicator) -> Graph:
    """The graph of all ranks' `components`; every rank must call it. What is wrong with it is in its `problems`."""
    # Its place in the communicator decides: an unpickled chain may be on another rank than the one that built it.
    everyone = comm.allgather_obj([replace(component, rank=comm.rank) for component in components])
    return connect([component for mine in everyone for component in mine], comm.size)


class Program:
    """What this rank does in a forward pass: its tasks in order, and its ends of the edges."""

    def __init__(self, graph: Graph, comm: Communicator, microbatches: int, taken_tags: int):
        self.graph = graph
        self.microbatches = microbatches
        self.components = graph.of_rank(comm.rank)
        self.takes_inputs = any(component.rank_in is None for component in self.components)
        self._rank = comm.rank
        self._tasks: dict[int, list[Task]] = {}  # by number of micro-batches
        self._channels = {
            edge: Channel(edge, comm, comm.traits.tag_limit - 1 - taken_tags - edge.number)
            for edge in graph.edges
            if edge.crosses_ranks and comm.rank in (edge.source.rank, edge.target.rank)
        }
        for edge, channel in self._channels.items():
            edges_of(comm).chains[channel.tag] = f"what {edge.source} sent to {edge.target} in the call"

    @staticmethod
    def agree(
        components: Sequence[Component], comm: Communicator, microbatches: int, previous: Program | None
    ) -> Program:
        """The program of all ranks' components; GraphError on every rank if they can not run. Every rank calls it.

        previous: what this rank has run so far, if it has: of what was sent in it, nothing stays on the way
        """
        told = comm.allgather_obj((microbatches, comm.replies.taken_tags, previous.sent() if previous else {}))
        if previous:
            previous.drop_unreceived([sent for *_, sent in told])
        graph = gather_graph(components, comm)
        problems = list(graph.problems)
        if len({m for m, *_ in told}) > 1:
            each = ", ".join(f"{m} on rank {rank}" for rank, (m, *_) in enumerate(told))
            problems.append(f"expected the same number of micro-batches on every rank, got {each}")
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise GraphError(
                f"rank {comm.rank} of {comm.size}: the graph of this MultiNodeChainList can not run:{lines}"
            )
        taken = max(number for _, number, _ in told)
        comm.replies.taken_tags = taken + len(graph.edges)
        return Program(graph, comm, microbatches, taken)

    def sent(self) -> dict[int, int]:
        """How many payloads this rank has sent on each tag."""
        return {end.tag: end.passed for edge, end in self._channels.items() if edge.source.rank == self._rank}

    def drop_unreceived(self, sent: Sequence[dict[int, int]]) -> None:
        """Receive, for nobody, what the other ranks have `sent` here, and a call that failed did not come to."""
        for edge, end in self._channels.items():
            if edge.target.rank == self._rank:
                end.drop(sent[edge.source.rank].get(end.tag, 0))

    @uncompiled
    def run(
        self, modules: Sequence[Callable[..., Any]], inputs: tuple[Any, ...], pieces: int
    ) -> tuple[list[Any], Tensor | None]:
        """This rank's outputs in the order of its components, and the delegate of everything it sent and received.

        pieces: how many micro-batches this batch is cut into, the same on every rank
        """
        batches = cut(inputs, pieces) if self.takes_inputs else []
        kept: dict[tuple[Edge, int], tuple[Any, int | None]] = {}
        outputs: dict[Component, list[tuple[Any, int | None]]] = {c: [] for c in self.components if c.rank_out is None}
        delegate = None
        if pieces not in self._tasks:
            self._tasks[pieces] = schedule(self.graph, pieces)[self._rank]
        for microbatch, place, _ in self._tasks[pieces]:
            component = self.components[place]
            if component.rank_in is None:
                arguments, rows = batches[microbatch]
            else:
                arguments, rows = [], None
                for edge in self.graph.incoming[component]:
                    if edge.crosses_ranks:
                        argument, its_rows, delegate = self._channels[edge].receive(delegate)
                    else:
                        argument, its_rows = kept.pop((edge, microbatch))
                    arguments.append(argument)
                    rows = its_rows if rows is None else rows
            try:
                result = modules[place](*arguments)
            except Exception as error:
                named = with_its_place(error, component, self.graph, arguments)
                if named is error:
                    raise
                raise named from error
            if component.rank_out is None:
                outputs[component].append((result, rows))
            for edge in self.graph.outgoing[component]:
                if edge.crosses_ranks:
                    delegate = self._channels[edge].send(result, rows, delegate)
                else:
                    kept[edge, microbatch] = result, rows
        whole = [put_together(results, str(component)) for component, results in outputs.items()]
        return whole, delegate
