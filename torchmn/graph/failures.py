"""What a user reads when a component of a chain raises: which one, on which rank, and what it was called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchmn.communicators.checks import describe
from torchmn.errors import ComponentError
from torchmn.graph.description import Component, Graph
from torchmn.graph.payload import flatten


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
