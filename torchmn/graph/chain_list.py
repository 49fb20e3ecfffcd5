"""MultiNodeChainList: one model whose components lie on several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from operator import index
from typing import Any

from torch import nn

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.graph.delegates import attach, blank
from torchmn.graph.description import Component, Graph
from torchmn.graph.microbatches import batch_dependent, rows_if_few
from torchmn.graph.payload import flatten, restore
from torchmn.graph.program import Program, gather_graph
from torchmn.graph.sequential import stage_of_rank


class MultiNodeChainList(nn.Module):
    """A model of components that lie on the ranks of `comm` and feed each other; each rank adds its own.

    Calling it runs this rank's components: with what the rank passes (where `rank_in` is None) or with what others
    send. It returns this rank's output (a tuple if several components have `rank_out=None`), or, on a rank without
    output, a 0-d delegate. So the training loop is the same everywhere:
    `loss = ...; loss.backward(); optimizer.step()`, with the delegate itself as the loss where there is no output.

    A component runs when its inputs are there; of several that could, the one added first. The graph is checked by
    all ranks together on first use and whenever a rank has changed it: a GraphError on every rank names both ends of
    what does not fit.

    With `microbatches=m` the batch (the first dim of every tensor) is cut into m parts that flow through the ranks
    as a pipeline, in forward and in backward, and outputs are joined again; a batch of fewer rows into as many as it
    has. The numbers stay those of m=1, but for
    layers whose result depends on the batch (BatchNorm): a warning names them.

    `state_dict`, `parameters`, `.to` and hooks are those of this rank's components, which are named "0", "1", ... in
    the order of add_link. A deep copy talks to the same ranks; a pickled one must be given its `comm` again.
    """

    comm: Communicator | None

    def __init__(self, comm: Communicator, microbatches: int = 1):
        super().__init__()
        if not isinstance(comm, Communicator):
            raise ArgumentError(f"MultiNodeChainList: expected comm to be a communicator, got {describe(comm)}")
        self.comm = comm
        self._components: list[Component] = []
        self._program: Program | None = None  # None if it has to be agreed on
        self._previous: Program | None = None
        self._warned_of: list[str] = []
        self.microbatches = microbatches

    @classmethod
    def from_sequential(
        cls,
        model: nn.Sequential,
        comm: Communicator,
        balance: str | Sequence[int] = "parameters",
        *,
        sample: Any = None,
        microbatches: int = 1,
    ) -> MultiNodeChainList:
        """A chain in which each rank holds a stretch of the layers of `model`; every rank passes the same `model`.

        `balance`: "parameters" gives each rank about as many of them; "time" measures, on rank 0, how long forward and
        backward of each layer take on `sample` (a small batch, needed on rank 0 only); a list says how many layers
        each rank gets, 0 for none. The first of these ranks takes the model's input, the last one has its output. The
        layers are not copied, and keep their names inside the stage, which is component 0.
        """
        stage, before, after = stage_of_rank(model, comm, balance, sample)
        chain = cls(comm, microbatches)
        if stage is not None:
            chain.add_link(stage, before, after)
        return chain

    @property
    def microbatches(self) -> int:
        """Into how many parts a batch is cut; the same on every rank."""
        return self._microbatches

    @microbatches.setter
    def microbatches(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"MultiNodeChainList: expected microbatches to be an int >= 1, got {describe(value)}")
        self._microbatches = value
        self._program = None

    def add_link(
        self,
        module: nn.Module,
        rank_in: int | Iterable[int] | None = None,
        rank_out: int | Iterable[int] | None = None,
    ) -> None:
        """Add a component on this rank.

        `rank_in`: None to call it with the model's arguments; a rank, or several, to call it with one argument from
        each, in this order. `rank_out`: None to make its result an output of the model; a rank, or several, to send
        it to each. The own rank keeps a value for a later component here. Between two ranks, the n-th value sent is
        the n-th received, in the order of add_link at both ends. A value is any nesting of tuples, lists and dicts
        of tensors, and arrives as one argument.
        """
        if not isinstance(module, nn.Module):
            raise ArgumentError(f"add_link: expected a torch.nn.Module, got {describe(module)}")
        place = len(self._components)
        rank = -1 if self.comm is None else self.comm.rank
        ends = _ranks("rank_in", rank_in), _ranks("rank_out", rank_out)
        self.add_module(str(place), module)
        self._components.append(Component(rank, place, type(module).__name__, *ends))
        self._program = None

    def __len__(self) -> int:
        return len(self._components)

    def __getitem__(self, place: int) -> nn.Module:
        """The component that was added as number `place` on this rank."""
        return self.get_submodule(str(self._components[place].place))

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[place] for place in range(len(self)))

    def forward(self, *inputs: Any) -> Any:
        program, pieces = self._agreed_program(inputs)
        if self.microbatches > 1:
            self._warn_of_batch_dependent_layers()
        try:
            outputs, delegate = program.run(list(self), inputs, pieces)
        except BaseException:
            # What this rank did not receive any more must not be taken for values of the next call: that agrees anew,
            # on edges of its own, and drops what is left on these.
            self._program = None
            raise
        if not outputs:
            return blank() if delegate is None else delegate
        result = outputs[0] if len(outputs) == 1 else tuple(outputs)
        if delegate is None:
            return result
        tensors, structure = flatten(result, keep_objects=True)
        return restore(structure, iter(attach(delegate, tensors)))

    def gather_graph(self) -> Graph:
        """The graph over all ranks, with the problems that it has; every rank must call it."""
        return gather_graph(self._components, self.require_comm())

    def require_comm(self) -> Communicator:
        """Returns `comm`; an ArgumentError if there is none."""
        if self.comm is None:
            raise ArgumentError("MultiNodeChainList was unpickled and has no communicator: assign one to its .comm")
        return self.comm

    @uncompiled
    def _agreed_program(self, inputs: tuple[Any, ...]) -> tuple[Program, int]:
        """The program of all ranks, and into how many micro-batches this batch is cut."""
        comm = self.require_comm()
        changed, rows, pieces = self._program is None, None, self._microbatches
        if pieces > 1 and any(component.rank_in is None for component in self._components):
            rows = rows_if_few(inputs, pieces)
        # One tiny message, by which a rank learns that another one changed the graph.
        told = comm.agree("MultiNodeChainList.forward", differ=(changed, rows))
        changed = any(its_change for its_change, _ in told)
        pieces = min([its_rows for _, its_rows in told if its_rows is not None], default=pieces)
        if changed or self._program is None:
            self._program = None  # stays so if the graph is refused: then the next call asks again
            self._program = Program.agree(self._components, comm, self._microbatches, self._previous)
            self._previous = self._program
        return self._program, pieces

    def _warn_of_batch_dependent_layers(self) -> None:
        found = [f"component {n}: {layer}" for n, module in enumerate(self) for layer in batch_dependent(module)]
        if found and found != self._warned_of:
            self._warned_of = found
            comm = self.require_comm()
            warnings.warn(
                f"rank {comm.rank} of {comm.size}: with microbatches={self._microbatches} these layers see one "
                f"micro-batch at a time, so the numbers are not those of microbatches=1: {', '.join(found)}. Use "
                "layers that treat each sample alone (GroupNorm, LayerNorm), or microbatches=1.",
                stacklevel=5,  # who called the chain
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeChainList:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        shared = {"comm": self.comm, "_program": None, "_previous": None}  # the copy agrees on edges of its own
        copy.__dict__.update({**{k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in shared}, **shared})
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None, "_program": None, "_previous": None}


def _ranks(name: str, ranks: Any) -> tuple[int, ...] | None:
    """`ranks` as a tuple; None stays None."""
    if ranks is None:
        return None
    try:
        return tuple(_rank(rank) for rank in (ranks if isinstance(ranks, Iterable) else (ranks,)))
    except TypeError:
        got = list(ranks) if isinstance(ranks, (list, tuple)) else ranks
        raise ArgumentError(
            f"add_link: expected {name} to be a rank (an int), a list of ranks, or None, got "
            f"{got if isinstance(got, list) and len(str(got)) < 60 else describe(ranks)}.{_in_a_list(name, got)}"
        ) from None


def _in_a_list(name: str, ranks: Any) -> str:
    """How a component gets the model's input beside what others send; the same for outputs."""
    if not isinstance(ranks, list) or not any(rank is None for rank in ranks):
        return ""
    if name == "rank_in":
        return (
            " None stands alone. A component that takes the model's input beside what other ranks send gets it from "
            "one of its own rank: add_link(nn.Identity(), rank_in=None, rank_out=own rank), with the own rank in "
            "this list"
        )
    return (
        " None stands alone. What is sent and is an output too goes by way of the own rank: put that into this list, "
        "and add_link(nn.Identity(), rank_in=own rank, rank_out=None)"
    )


def _rank(rank: Any) -> int:
    if isinstance(rank, bool):
        raise TypeError
    return index(rank)  # NumPy's integers too
