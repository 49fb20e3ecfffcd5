"""A recurrent network whose time steps are split over ranks: outputs and gradients of the whole network on one rank."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import torchmn
from tests._worlds import ranks
from torchmn.nn import create_multi_node_n_step_rnn

KINDS = {
    "RNN tanh": lambda **options: nn.RNN(3, 4, **options),
    "RNN relu": lambda **options: nn.RNN(3, 4, nonlinearity="relu", **options),
    "GRU": lambda **options: nn.GRU(3, 4, **options),
    "LSTM": lambda **options: nn.LSTM(3, 4, **options),
    "projected LSTM": lambda **options: nn.LSTM(3, 4, proj_size=2, **options),
}
SHAPES = [{}, {"num_layers": 2}, {"bidirectional": True}, {"num_layers": 2, "bidirectional": True, "batch_first": True}]


def built(kind, options, seed=0):
    """The same network on every rank, whose threads share torch's random state."""
    network, generator = KINDS[kind](dtype=torch.float64, **options), torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator)
    return network


def series(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def states_of(states):
    return states if isinstance(states, tuple) else (states,)


def loss_of(output, states, rank):
    """Weighs h and c differently, so that gradients that got mixed up are noticed."""
    return (output * (rank + 1)).sin().sum() + sum((n + 2) * s.cos().sum() for n, s in enumerate(states_of(states)))


def check_equal(mine, expected):
    for got, right in zip(mine, expected, strict=True):
        torch.testing.assert_close(got, right)


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_states_go_from_rank_to_rank_and_their_gradients_come_back(comm, kind, options):
    check_beside_one_rank(comm, kind, options)


@ranks(2, on=["mpi", "gloo"])
def test_they_cross_processes(comm):
    check_beside_one_rank(comm, "LSTM", SHAPES[-1])


def check_beside_one_rank(comm, kind, options):
    steps = [series(rank, 5, 5, 3) for rank in range(comm.size)]
    whole, states, expected_loss, expected = [built(kind, options, rank) for rank in range(comm.size)], None, 0, []
    for rank, network in enumerate(whole):
        output, states = network(steps[rank], states)
        expected.append((output, states))
        expected_loss = expected_loss + loss_of(output, states, rank)
    expected_loss.backward()

    x = series(comm.rank, 5, 5, 3)
    rank_in = comm.rank - 1 if comm.rank else None
    rank_out = comm.rank + 1 if comm.rank + 1 < comm.size else None
    rnn = create_multi_node_n_step_rnn(built(kind, options, comm.rank), comm, rank_in, rank_out)
    output, states, delegate = rnn(x)
    assert (delegate is None) == (rank_out is None)
    check_equal((output, *states_of(states)), (expected[comm.rank][0], *states_of(expected[comm.rank][1])))
    loss = loss_of(output, states, comm.rank)
    (loss if delegate is None else loss + delegate).backward()
    check_equal((x.grad,), (steps[comm.rank].grad,))
    check_equal([p.grad for p in rnn.actual_rnn.parameters()], [p.grad for p in whole[comm.rank].parameters()])


@ranks(2, on="threads")
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_packed_sequences_in_any_order_of_length(comm, kind):
    """An encoder and a decoder, as in translation; the encoder has no loss."""
    lengths = [[2, 4, 1], [3, 1, 2]]
    steps = [series(rank, 4, 3, 3) for rank in range(2)]

    def packed(rank, x):
        return pack_padded_sequence(x, lengths[rank], enforce_sorted=False)

    whole = [built(kind, {}, rank) for rank in range(2)]
    _, states = whole[0](packed(0, steps[0]))
    output, _ = whole[1](packed(1, steps[1]), states)
    padded, _ = pad_packed_sequence(output)
    padded.sin().sum().backward()

    x = series(comm.rank, 4, 3, 3)
    peers = {"rank_out": 1} if comm.rank == 0 else {"rank_in": 0}
    rnn = create_multi_node_n_step_rnn(built(kind, {}, comm.rank), comm, **peers)
    mine, _, delegate = rnn(packed(comm.rank, x))
    if comm.rank == 0:
        delegate.backward()
    else:
        assert isinstance(mine, PackedSequence)
        torch.testing.assert_close(pad_packed_sequence(mine)[0], padded)
        pad_packed_sequence(mine)[0].sin().sum().backward()
    torch.testing.assert_close(x.grad, steps[comm.rank].grad)
    check_equal([p.grad for p in rnn.parameters()], [p.grad for p in whole[comm.rank].parameters()])


@ranks(2, on="threads")
def test_it_trains_like_the_network_on_one_rank(comm):
    whole = [built("LSTM", {}, rank) for rank in range(2)]
    every = torch.optim.SGD([p for network in whole for p in network.parameters()], lr=0.1)
    part = create_multi_node_n_step_rnn(
        built("LSTM", {}, comm.rank), comm, **({"rank_out": 1} if comm.rank == 0 else {"rank_in": 0})
    )
    mine = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(20):
        x = [series(10 * step + rank, 3, 2, 3).detach() for rank in range(2)]
        every.zero_grad()
        mine.zero_grad()
        output, _ = whole[1](x[1], whole[0](x[0])[1])
        output.square().mean().backward()
        output, _, delegate = part(x[comm.rank])
        (delegate if comm.rank == 0 else output.square().mean()).backward()
        every.step()
        mine.step()
    check_equal(list(part.parameters()), list(whole[comm.rank].parameters()))


@ranks(2, on="threads")
def test_an_earlier_delegate_is_passed_on_to_the_first_state(comm):
    x = series(comm.rank, 2, 1, 3)
    weight = torch.ones(2, requires_grad=True)
    if comm.rank == 0:
        output, _, delegate = create_multi_node_n_step_rnn(built("LSTM", {}), comm, rank_out=1)(x)
        received = torchmn.functions.recv(comm, 1, delegate_variable=delegate, tag=3)
        (received * 5).sum().backward()
    else:
        phi = torchmn.functions.send(weight, comm, 0, tag=3)
        rnn = create_multi_node_n_step_rnn(built("LSTM", {}), comm, rank_in=0)
        output, _, _ = rnn(x, delegate_variable=phi)
        output.sum().backward()
        assert weight.grad.tolist() == [5.0, 5.0]
    assert x.grad.any()


@ranks(1, on="threads")
def test_a_copy_has_parameters_of_its_own_and_the_same_communicator(comm):
    rnn = create_multi_node_n_step_rnn(nn.GRU(1, 1), comm)
    copied = deepcopy(rnn)
    assert copied.communicator is comm
    assert copied.actual_rnn.weight_ih_l0 is not rnn.actual_rnn.weight_ih_l0
    assert list(rnn.state_dict()) == [f"actual_rnn.{name}" for name in nn.GRU(1, 1).state_dict()]


@ranks(2, on="threads")
def test_one_that_was_pickled_works_when_it_has_a_communicator_again(comm):
    ends = {"rank_out": 1} if comm.rank == 0 else {"rank_in": 0}
    rnn = pickle.loads(pickle.dumps(create_multi_node_n_step_rnn(nn.GRU(1, 1), comm, **ends)))
    with pytest.raises(torchmn.ArgumentError, match=r"assign a communicator to its \.communicator"):
        rnn(torch.zeros(1, 1, 1))
    assert "no communicator" in repr(rnn)
    rnn.communicator = comm
    output, _, delegate = rnn(torch.zeros(1, 1, 1))
    (output.sum() if delegate is None else delegate).backward()
    assert rnn.actual_rnn.bias_hh_l0.grad.any()


@ranks(2, on="threads")
def test_wrong_arguments_are_refused(comm):
    with pytest.raises(
        torchmn.ArgumentError, match=r"expected an nn.RNN, nn.GRU or nn.LSTM, got an object of type Linear"
    ):
        create_multi_node_n_step_rnn(nn.Linear(1, 1), comm)
    with pytest.raises(torchmn.ArgumentError, match=r"expected rank_in in 0..1, got 2"):
        create_multi_node_n_step_rnn(nn.GRU(1, 1), comm, rank_in=2)
    with pytest.raises(torchmn.ArgumentError, match="expected rank_out to be another rank"):
        create_multi_node_n_step_rnn(nn.GRU(1, 1), comm, rank_out=comm.rank)
    rnn = create_multi_node_n_step_rnn(nn.GRU(1, 1), comm, rank_in=1 - comm.rank)
    with pytest.raises(torchmn.ArgumentError, match="expected hx to be None"):
        rnn(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1))
