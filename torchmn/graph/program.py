"""Program: runs the forward pass of one rank of a chain whose graph all ranks agreed on."""

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
from torchmn.graph.description import Component, Graph, GraphEdge, connect
from torchmn.graph.microbatches import concatenate, cut
from torchmn.graph.payload import flatten
from torchmn.graph.schedule import Task, schedule

Result = tuple[Any, int | None]
"""The result of a component for one micro-batch, and the number of rows of that."""


def gather_graph(components: Sequence[Component], comm: Communicator) -> Graph:
    """Returns the graph of all ranks' `components`, with its problems; every rank must call this."""
    # An unpickled chain may be on another rank than the one that built it: the rank in `comm` counts.
    by_rank = comm.allgather_obj([replace(component, rank=comm.rank) for component in components])
    return connect([component for of_rank in by_rank for component in of_rank], comm.size)


class Program:
    """The tasks of this rank in a forward pass, in order, and its ends of the edges."""

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
            edges_of(comm).chain_edges[channel.tag] = f"what {edge.source} sent to {edge.target} in the call"

    @staticmethod
    def agree(
        components: Sequence[Component], comm: Communicator, microbatches: int, previous: Program | None
    ) -> Program:
        """Returns a new program; every rank must call this.

        Args:
            components: of this rank.
            comm: communicator of the chain.
            microbatches: must be the same on all ranks.
            previous: the program that this rank has run so far; messages of it that were not received are dropped.

        Raises:
            GraphError: on every rank, if the graph cannot run.
        """
        states = comm.allgather_obj((microbatches, comm.replies.taken_tags, previous.sent() if previous else {}))
        if previous:
            previous.drop_unreceived([sent for *_, sent in states])
        graph = gather_graph(components, comm)
        problems = list(graph.problems)
        if len({m for m, *_ in states}) > 1:
            got = ", ".join(f"{m} on rank {rank}" for rank, (m, *_) in enumerate(states))
            problems.append(f"expected the same number of micro-batches on every rank, got {got}")
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise GraphError(
                f"rank {comm.rank} of {comm.size}: the graph of this MultiNodeChainList cannot run:{lines}"
            )
        taken = max(number for _, number, _ in states)
        comm.replies.taken_tags = taken + len(graph.edges)
        return Program(graph, comm, microbatches, taken)

    def sent(self) -> dict[int, int]:
        """Returns the number of payloads that this rank has sent, by tag."""
        return {end.tag: end.payloads for edge, end in self._channels.items() if edge.source.rank == self._rank}

    def drop_unreceived(self, sent: Sequence[dict[int, int]]) -> None:
        """Receives and discards what other ranks have `sent` and a failed call of this rank did not receive."""
        for edge, end in self._channels.items():
            if edge.target.rank == self._rank:
                end.drop(sent[edge.source.rank].get(end.tag, 0))

    @uncompiled
    def run(
        self, modules: Sequence[Callable[..., Any]], inputs: tuple[Any, ...], pieces: int
    ) -> tuple[list[Any], Tensor | None]:
        """Runs this rank's components; returns their outputs in order, and the delegate of all messages.

        Args:
            modules: the components of this rank.
            inputs: the arguments of the model, on this rank.
            pieces: number of micro-batches, the same on every rank.
        """
        batches = cut(inputs, pieces) if self.takes_inputs else []
        local: dict[tuple[GraphEdge, int], Result] = {}  # by edge and micro-batch
        outputs: dict[Component, list[Result]] = {c: [] for c in self.components if c.rank_out is None}
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
                        argument, argument_rows, delegate = self._channels[edge].receive(delegate)
                    else:
                        argument, argument_rows = local.pop((edge, microbatch))
                    arguments.append(argument)
                    rows = argument_rows if rows is None else rows
            result = self._call(modules[place], component, arguments)
            if component.rank_out is None:
                outputs[component].append((result, rows))
            for edge in self.graph.outgoing[component]:
                if edge.crosses_ranks:
                    delegate = self._channels[edge].send(result, rows, delegate)
                else:
                    local[edge, microbatch] = result, rows
        return [concatenate(results, str(component)) for component, results in outputs.items()], delegate

    def _call(self, module: Callable[..., Any], component: Component, arguments: Sequence[Any]) -> Any:
        """Calls a component. An exception of one of Python's classes becomes a ComponentError that names it.

        Exceptions of other classes are not changed: users may catch them, and TorchMN's name their place already.
        """
        try:
            return module(*arguments)
        except Exception as error:
            if type(error).__module__ != "builtins":
                raise
            sources = [str(edge.source) for edge in self.graph.incoming[component]]
            where = f"rank {component.rank} of {self.graph.size}: component {component.place} ({component.name})"
            called_with = _called_with(component, sources, arguments)
            raise ComponentError(f"{where} raised {type(error).__name__}: {error}\n{called_with}") from error


def _called_with(component: Component, sources: Sequence[str], arguments: Sequence[Any]) -> str:
    if component.rank_in is None:
        if not arguments:
            return (
                "It was called without arguments: its rank_in is None, so it gets the arguments of the chain on this "
                "rank, of which there were none. Pass the model's input on this rank, or add it with the rank_in that "
                "it gets its arguments from."
            )
        sources = ["the call of the chain on this rank"] * len(arguments)
    if not arguments:
        return "It was called without arguments: its rank_in is an empty list."
    got = [f"{_shapes(argument)} from {source}" for argument, source in zip(arguments, sources, strict=True)]
    return f"It was called with {len(got)} argument{'s' * (len(got) > 1)}: {'; '.join(got)}."


def _shapes(argument: Any) -> str:
    """Returns a description of `argument`, with the shape of every tensor in it."""
    tensors, _ = flatten(argument, keep_objects=True)
    if tensors and tensors[0] is not argument:
        return f"a {type(argument).__name__} with {', '.join(map(describe, tensors))}"
    return describe(argument)
