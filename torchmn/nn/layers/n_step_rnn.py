"""A recurrent network over several ranks: one rank's final states are the next rank's initial states."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchmn import functions as F
from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator
from torchmn.errors import ArgumentError
from torchmn.functions.pseudo_connect import connect

_Recurrent = nn.RNN | nn.GRU | nn.LSTM


def create_multi_node_n_step_rnn(
    rnn: _Recurrent, comm: Communicator, rank_in: int | None = None, rank_out: int | None = None, *, tag: int = 0
) -> MultiNodeNStepRNN:
    """`rnn` as one part of a recurrent network over ranks: see `MultiNodeNStepRNN`.

    `rnn` is an `nn.RNN`, `nn.GRU` or `nn.LSTM`, of any number of layers and directions; its parameters are shared,
    not copied. The parts of one network must have the same kind, number of layers, directions and hidden size.
    """
    return MultiNodeNStepRNN(rnn, comm, rank_in, rank_out, tag)


class MultiNodeNStepRNN(nn.Module):
    """A recurrent network that gets its initial states from `rank_in` and sends its final states to `rank_out`.

    Either may be None. Each state (`h`, and `c` of an LSTM) is a message of its own, with a gradient of its own. The
    network itself is at `actual_rnn`. A deep copy talks to the same ranks; a pickled one must be given its
    `communicator` again.
    """

    communicator: Communicator | None

    def __init__(self, rnn: _Recurrent, comm: Communicator, rank_in: int | None, rank_out: int | None, tag: int):
        super().__init__()
        where = f"rank {comm.rank} of {comm.size}: create_multi_node_n_step_rnn"
        if not isinstance(rnn, nn.RNN | nn.GRU | nn.LSTM):
            raise ArgumentError(f"{where}: expected an nn.RNN, nn.GRU or nn.LSTM, got {arguments.describe(rnn)}")
        for name, peer in (("rank_in", rank_in), ("rank_out", rank_out)):
            problem = None if peer is None else arguments.rank_problem(peer, comm.size, name)
            if problem is None and peer == comm.rank:
                problem = f"expected {name} to be another rank, got this rank itself ({peer})"
            if problem:
                raise ArgumentError(f"{where}: {problem}")
        self.actual_rnn = rnn
        self.communicator = comm
        self.rank_in = rank_in
        self.rank_out = rank_out
        self.tag = tag

    def forward(
        self, sequence: Tensor | PackedSequence, hx: Any = None, *, delegate_variable: Tensor | None = None
    ) -> tuple[Any, Any, Tensor | None]:
        """What the network returns (its output, and its final states), and a delegate for what was sent, or None.

        The delegate must take part in this rank's backward, as that of `functions.send` must: where this rank has no
        loss of its own, call backward on it. `delegate_variable` is that of an earlier `send`; it is passed on to the
        first `recv`. The initial states `hx` may be given where they do not come from another rank.
        """
        comm = self.communicator
        if comm is None:
            raise ArgumentError("MultiNodeNStepRNN was unpickled: assign a communicator to its .communicator")
        if self.rank_in is not None:
            if hx is not None:
                raise ArgumentError(
                    f"rank {comm.rank} of {comm.size}: the initial states come from rank {self.rank_in}: expected hx "
                    "to be None"
                )
            hx = self._received(comm, delegate_variable)
        elif delegate_variable is not None:
            raise ArgumentError(
                f"rank {comm.rank} of {comm.size}: expected delegate_variable only where the initial states come from "
                "another rank (rank_in); join it to the output by pseudo_connect"
            )
        output, states = self.actual_rnn(sequence, hx)
        return output, states, None if self.rank_out is None else self._sent(comm, states)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeNStepRNN:
        memo[id(self.communicator)] = self.communicator  # a place in the world, which copies share
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = deepcopy(self.__dict__, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "communicator": None}  # which is this process's alone

    def extra_repr(self) -> str:
        here = "no communicator" if self.communicator is None else f"rank {self.communicator.rank}"
        return f"{here}, rank_in={self.rank_in}, rank_out={self.rank_out}"

    def _received(self, comm: Communicator, delegate: Tensor | None) -> Any:
        assert self.rank_in is not None
        h = F.recv(comm, self.rank_in, delegate, self.tag)
        if not isinstance(self.actual_rnn, nn.LSTM):
            return h
        return h, F.recv(comm, self.rank_in, tag=self.tag)

    def _sent(self, comm: Communicator, states: Any) -> Tensor:
        assert self.rank_out is not None
        delegate = None
        for state in states if isinstance(self.actual_rnn, nn.LSTM) else (states,):
            sent = F.send(state, comm, self.rank_out, self.tag)
            (delegate,) = connect(delegate, (sent,))
        assert delegate is not None
        return delegate
