"""MultiNodeNStepRNN: a recurrent network over several ranks, which pass their final states on as initial states."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchmn import functions as F
from torchmn.communicators import arguments
from torchmn.communicators.communicator import Communicator, as_communicator
from torchmn.errors import ArgumentError
from torchmn.functions.pseudo_connect import connect
from torchmn.other_spellings import other_spellings

_Recurrent = nn.RNN | nn.GRU | nn.LSTM


@other_spellings
def create_multi_node_n_step_rnn(
    rnn: _Recurrent, comm: Communicator, rank_in: int | None = None, rank_out: int | None = None, *, tag: int = 0
) -> MultiNodeNStepRNN:
    """Returns `rnn` as one part of a recurrent network over several ranks.

    All parts of a network must have the same kind, number of layers, directions and hidden size.

    Args:
        rnn: an `nn.RNN`, `nn.GRU` or `nn.LSTM`, of any number of layers and directions. It is used, not copied.
        comm: communicator of the ranks.
        rank_in: the rank from which the initial states come; None if they are zero or passed to forward.
        rank_out: the rank to which the final states are sent; None if they are not sent.
        tag: of the messages.

    Returns:
        The `MultiNodeNStepRNN`.

    Raises:
        ArgumentError: on this rank, if `rnn` is another module, or a rank is out of range or this one.
    """
    comm = as_communicator(comm, "create_multi_node_n_step_rnn")
    return MultiNodeNStepRNN(rnn, comm, rank_in, rank_out, tag)


class MultiNodeNStepRNN(nn.Module):
    """A recurrent network that receives its initial states from `rank_in` and sends its final states to `rank_out`.

    Each state (`h`, and `c` of an LSTM) is a separate message, whose gradient is sent back in backward. A deep copy
    uses the same communicator; after unpickling, `communicator` must be assigned again.

    Args:
        rnn: the recurrent network of this rank.
        comm: communicator of the ranks.
        rank_in: rank that sends the initial states; None if the caller may pass them.
        rank_out: rank that receives the final states; None if none does.
        tag: of the messages.

    Attributes:
        actual_rnn: the recurrent network of this rank.
        communicator: of the ranks.
        rank_in, rank_out: see `create_multi_node_n_step_rnn`.
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
        """Runs the network, with the states of other ranks.

        Args:
            sequence: the input of the network.
            hx: initial states; only if `rank_in` is None.
            delegate_variable: the delegate of an earlier `functions.send`, passed on to the first `recv`.

        Returns:
            Output and final states as the network returns them, and the delegate of the messages that were sent; None
            if `rank_out` is None. As with `functions.send`, the delegate must be part of this rank's backward: on a
            rank without a loss, call its `backward()`.

        Raises:
            ArgumentError: if `hx` is given and `rank_in` too, or a delegate without `rank_in`; for a list of sequences.
        """
        comm = self.communicator
        if comm is None:
            raise ArgumentError("MultiNodeNStepRNN was unpickled: assign a communicator to its .communicator")
        if not isinstance(sequence, Tensor | PackedSequence):
            raise ArgumentError(
                f"rank {comm.rank} of {comm.size}: MultiNodeNStepRNN: expected a padded tensor or a PackedSequence, "
                f"got {arguments.describe(sequence)}. torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)"
                " makes one of a list of sequences"
            )
        if self.rank_in is not None:
            if hx is not None:
                raise ArgumentError(
                    f"rank {comm.rank} of {comm.size}: MultiNodeNStepRNN: expected hx to be None, since the initial "
                    f"states come from rank {self.rank_in}, got {arguments.describe(hx)}"
                )
            hx = self._receive(comm, delegate_variable)
        elif delegate_variable is not None:
            raise ArgumentError(
                f"rank {comm.rank} of {comm.size}: MultiNodeNStepRNN: expected delegate_variable only with rank_in, "
                "the rank from which the initial states come. Connect it to the output with pseudo_connect"
            )
        output, states = self.actual_rnn(sequence, hx)
        return output, states, None if self.rank_out is None else self._send(comm, states)

    def __deepcopy__(self, memo: dict[int, Any]) -> MultiNodeNStepRNN:
        memo[id(self.communicator)] = self.communicator  # copies use the same communicator
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__ = deepcopy(self.__dict__, memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "communicator": None}  # a communicator cannot be pickled

    def extra_repr(self) -> str:
        here = "no communicator" if self.communicator is None else f"rank {self.communicator.rank}"
        return f"{here}, rank_in={self.rank_in}, rank_out={self.rank_out}"

    def _receive(self, comm: Communicator, delegate: Tensor | None) -> Any:
        assert self.rank_in is not None
        h = F.recv(comm, self.rank_in, delegate, self.tag)
        if not isinstance(self.actual_rnn, nn.LSTM):
            return h
        return h, F.recv(comm, self.rank_in, tag=self.tag)

    def _send(self, comm: Communicator, states: Any) -> Tensor:
        assert self.rank_out is not None
        delegate = None
        for state in states if isinstance(self.actual_rnn, nn.LSTM) else (states,):
            sent = F.send(state, comm, self.rank_out, self.tag)
            (delegate,) = connect(delegate, (sent,))
        assert delegate is not None
        return delegate
