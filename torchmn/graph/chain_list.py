"""MultiNodeChainList: one model whose components are on several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from operator import index
from typing import Any

from torch import nn

from torchmn.communicators.arguments import describe
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.compile_boundary import uncompiled
from torchmn.errors import ArgumentError
from torchmn.graph.delegates import attach, blank
from torchmn.graph.description import Component, Graph
from torchmn.graph.microbatches import batch_dependent, rows_if_few
from torchmn.graph.payload import flatten, restore
from torchmn.graph.program import Program, gather_graph
from torchmn.graph.sequential import stage_of_rank
from torchmn.other_spellings import other_spellings


class MultiNodeChainList(nn.Module):
    """A model whose components are on the ranks of `comm` and send their results to each other.

    Each rank adds its own components. Calling the model runs them, with the arguments of the call (for `rank_in=None`)
    or with what other ranks send. It returns this rank's output (a tuple if several components have `rank_out=None`),
    or, on a rank without output, a 0-d delegate. So the training loop is the same on all ranks:
    `loss = ...; loss.backward(); optimizer.step()`, with the delegate as the loss of a rank without output.

    A component runs when its inputs are available; of several, the one added first. All ranks check the graph together
    on first use and whenever a rank has changed it.

    With `microbatches=m` the batch (the first dim of every tensor) is cut into m micro-batches, or one per row if it
    has fewer rows. They pass through the ranks as a pipeline, in forward and backward; outputs are concatenated again.
    The numbers are those of m=1, except for layers whose result depends on the batch (BatchNorm): a warning names them.

    `state_dict`, `parameters`, `.to` and hooks are those of this rank's components, which are named "0", "1", ... in
    the order of add_link. A deep copy uses the same communicator; after unpickling, assign one to `comm`.

    Args:
        comm: communicator of the ranks.
        microbatches: number of micro-batches, the same on all ranks.

    Attributes:
        differs_between_ranks: True: ranks hold different components, so an optimizer must not average their gradients.

    Raises:
        ArgumentError: for wrong arguments.
        GraphError: from `forward`, on every rank, with both ends of each edge that does not match.
        ComponentError: from `forward`, if a component raised one of Python's exceptions.
    """

    comm: Communicator | None
    differs_between_ranks = True

    def __init__(self, comm: Communicator, microbatches: int = 1):
        super().__init__()
        comm = as_communicator(comm, "MultiNodeChainList")
        self.comm = comm
        self._components: list[Component] = []
        self._program: Program | None = None  # None until ranks agree on one
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
        """Returns a pipeline in which each rank has consecutive layers of `model`, as component 0.

        The first rank takes the model's input, the last one has its output. Layers are not copied, and keep their names
        inside of the component.

        Args:
            model: the layers; the same on all ranks.
            comm: communicator of the ranks.
            balance: "parameters" gives each rank about the same number of parameters; "time" measures on rank 0 how
                long forward and backward of each layer take on `sample`; a list contains the number of layers of each
                rank, 0 for none.
            sample: a small batch, for `balance="time"`, on rank 0 only.
            microbatches: see the class.

        Returns:
            The chain; each rank has the parameters of its layers.

        Raises:
            ArgumentError: on every rank, for wrong arguments on one.
            MismatchError: on every rank, if models or `balance` differ.
            GraphError: if two ranks would share a parameter.
        """
        stage, before, after = stage_of_rank(model, comm, balance, sample)
        chain = cls(comm, microbatches)
        if stage is not None:
            chain.add_link(stage, before, after)
        return chain

    @property
    def microbatches(self) -> int:
        """Number of micro-batches of a batch; the same on every rank."""
        return self._microbatches

    @microbatches.setter
    def microbatches(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(f"MultiNodeChainList: expected microbatches to be an int >= 1, got {describe(value)}")
        self._microbatches = value
        self._program = None

    @other_spellings
    def add_link(
        self,
        module: nn.Module,
        rank_in: int | Iterable[int] | None = None,
        rank_out: int | Iterable[int] | None = None,
    ) -> None:
        """Adds a component on this rank.

        Between two ranks, the n-th value sent is the n-th received, in the order of add_link on both ranks. A value is
        any nesting of tuples, lists and dicts of tensors, and is received as one argument. With this rank in both
        lists, a value is passed to another component of this rank.

        Args:
            module: the component.
            rank_in: None to call it with the model's arguments; a rank, or several, to call it with one argument from
                each, in this order.
            rank_out: None to make its result an output of the model; a rank, or several, to send it to each.

        Raises:
            ArgumentError: for arguments of other types.
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
        """Returns the component that was added as number `place` on this rank."""
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
            # The next call must not receive values of this one: it agrees on a new program with new tags, and drops
            # the values that this call did not receive.
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
        """Returns the graph of all ranks, with its problems; every rank must call this."""
        return gather_graph(self._components, self.require_comm())

    def require_comm(self) -> Communicator:
        """Returns `comm`; raises an ArgumentError if there is none."""
        if self.comm is None:
            raise ArgumentError("MultiNodeChainList was unpickled and has no communicator: assign one to its .comm")
        return self.comm

    @uncompiled
    def _agreed_program(self, inputs: tuple[Any, ...]) -> tuple[Program, int]:
        """Returns the program that ranks agreed on, and the number of micro-batches of this batch."""
        comm = self.require_comm()
        rows, pieces = None, self._microbatches
        if pieces > 1 and any(component.rank_in is None for component in self._components):
            rows = rows_if_few(inputs, pieces)
        # Another rank may have changed the graph.
        states = comm.agree("MultiNodeChainList.forward", differ=(self._program is None, rows))
        pieces = min([rows for _, rows in states if rows is not None], default=pieces)
        if self._program is None or any(changed for changed, _ in states):
            self._program = None  # if the graph has problems, the next call checks it again
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
                stacklevel=5,  # the caller of the chain
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeChainList:
        copy = type(self).__new__(type(self))
        memo[id(self)] = copy
        shared = {"comm": self.comm, "_program": None, "_previous": None}  # the copy gets its own tags
        copy.__dict__.update({**{k: deepcopy(v, memo) for k, v in self.__dict__.items() if k not in shared}, **shared})
        return copy

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "comm": None, "_program": None, "_previous": None}


def _ranks(name: str, ranks: Any) -> tuple[int, ...] | None:
    """Returns `ranks` as a tuple; None for None."""
    if ranks is None:
        return None
    try:
        return tuple(_rank(rank) for rank in (ranks if isinstance(ranks, Iterable) else (ranks,)))
    except TypeError:
        got = list(ranks) if isinstance(ranks, (list, tuple)) else ranks
        raise ArgumentError(
            f"add_link: expected {name} to be a rank (an int), a list of ranks, or None, got "
            f"{got if isinstance(got, list) and len(str(got)) < 60 else describe(ranks)}.{_advice(name, got)}"
        ) from None


def _advice(name: str, ranks: Any) -> str:
    """Returns how a component gets the model's input and values of ranks; the same for outputs."""
    if not isinstance(ranks, list) or not any(rank is None for rank in ranks):
        return ""
    if name == "rank_in":
        return (
            " None cannot be in a list. A component that takes the model's input and values of other ranks gets the "
            "input from a component of its own rank: add_link(nn.Identity(), rank_in=None, rank_out=own rank), with "
            "the own rank in this list"
        )
    return (
        " None cannot be in a list. For a value that is sent and is an output, too, put the own rank into this list, "
        "and add_link(nn.Identity(), rank_in=own rank, rank_out=None)"
    )


def _rank(rank: Any) -> int:
    if isinstance(rank, bool):
        raise TypeError
    return index(rank)  # also for NumPy's integers
