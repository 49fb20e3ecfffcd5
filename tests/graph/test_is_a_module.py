"""A chain is a torch.nn.Module like any other, beside other chains and other messages on its communicator."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests._worlds import ranks
from tests._worlds.data import assert_still_works
from torchmn.errors import ArgumentError
from torchmn.graph import MultiNodeChainList


def relay(comm, seed: int = 0, microbatches: int = 1) -> MultiNodeChainList:
    """A Linear on each rank, from the first to the last."""
    chain = MultiNodeChainList(comm, microbatches)
    before = comm.rank - 1 if comm.rank else None
    after = comm.rank + 1 if comm.rank + 1 < comm.size else None
    linear = nn.Linear(2, 2, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0, comm.rank], [seed, 2.0]]))
        linear.bias.fill_(comm.rank)
    chain.add_link(linear, before, after)
    return chain


def relayed(x: torch.Tensor, size: int, seed: int = 0) -> torch.Tensor:
    for rank in range(size):
        x = x @ torch.tensor([[1.0, rank], [seed, 2.0]], dtype=x.dtype).T + rank
    return x


@ranks(1, 2, 3, on="threads")
def test_state_parameters_and_modes_are_those_of_this_rank(comm):
    chain = relay(comm)
    assert list(chain.state_dict()) == ["0.weight", "0.bias"]
    assert len(list(chain.parameters())) == 2
    assert len(chain) == 1 and chain[0] is next(iter(chain)) is chain[-1]
    assert not chain.eval()[0].training
    assert chain.to(torch.float32)[0].weight.dtype == torch.float32
    other = relay(comm, seed=5)
    other.load_state_dict(chain.state_dict())
    x = torch.ones(1, 2, dtype=torch.float64)
    expected = relayed(x, comm.size)
    y = other(x)
    assert y.tolist() == expected.tolist() if comm.rank == comm.size - 1 else y.shape == ()


@ranks(2, on="threads")
def test_hooks_see_calls(comm):
    chain, seen = relay(comm), []
    chain.register_forward_hook(lambda module, inputs, output: seen.append(output))
    chain[0].register_full_backward_hook(lambda module, gradients, _: seen.append("backward"))
    y = chain(torch.ones(1, 2, dtype=torch.float64, requires_grad=True))
    y.sum().backward()
    assert seen[0] is y and seen[1] == "backward"


@ranks(1, 2, 3, on="threads")
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_evaluation_without_gradients_between_training_steps(comm, off, microbatches):
    chain = relay(comm, microbatches=microbatches)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
    for _ in range(3):
        with off():
            y = chain(x)
        assert not y.requires_grad
        if comm.rank == comm.size - 1:
            assert y.tolist() == relayed(x, comm.size).tolist()
        chain(x).sum().backward()
    assert chain[0].bias.grad is not None


@ranks(2, 3, on="threads")
def test_every_rank_can_call_backward_even_if_nothing_needs_a_gradient(comm):
    chain = relay(comm).requires_grad_(False)
    chain(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    on_the_last_rank_only = MultiNodeChainList(comm)
    if comm.rank == comm.size - 1:
        on_the_last_rank_only.add_link(nn.Identity())
    y = on_the_last_rank_only(*[torch.ones(2)] * (comm.rank == comm.size - 1))
    if comm.rank < comm.size - 1:
        assert y.shape == () and y == 0
        y.backward()
    assert_still_works(comm)


@ranks(2, 3, on="threads")
def test_a_frozen_first_stage(comm):
    chain = relay(comm)
    if comm.rank == 0:
        chain.requires_grad_(False)
    y = chain(torch.ones(1, 2, dtype=torch.float64))
    y.sum().backward()
    assert (chain[0].weight.grad is None) == (comm.rank == 0)


@ranks(2, 3, on="threads")
def test_one_rank_without_gradients_while_the_others_train(comm):
    chain = relay(comm)
    x = torch.ones(1, 2, dtype=torch.float64)
    for _ in range(2):
        with torch.set_grad_enabled(comm.rank > 0):
            y = chain(x)
        if comm.rank == comm.size - 1:
            assert y.tolist() == relayed(x, comm.size).tolist()
        if comm.rank > 0:
            y.sum().backward()
    assert (chain[0].weight.grad is None) == (comm.rank == 0)
    assert_still_works(comm)


@ranks(2, 3, on="threads")
def test_without_checks_a_rank_may_run_ahead_of_the_next_one(comm):
    comm.settings.checks = False
    chain = relay(comm)
    x = torch.ones(1, 2, dtype=torch.float64)
    with torch.no_grad():
        outputs = [chain(n * x) for n in range(5)]
    if comm.rank == comm.size - 1:
        assert [y.tolist() for y in outputs] == [relayed(n * x, comm.size).tolist() for n in range(5)]


@ranks(2, 3, on=("threads", "mpi"))
def test_two_chains_whose_calls_and_backwards_interleave_with_messages_of_the_user(comm):
    first, second = relay(comm), relay(comm, seed=3)
    x = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    other = comm.size - 1 - comm.rank
    if other != comm.rank:
        comm.send(torch.tensor([float(comm.rank)]), other)
    for _ in range(3):
        one, two, three = first(x), second(2 * x), first(3 * x)
        if comm.rank == comm.size - 1:
            assert one.tolist() == relayed(x, comm.size).tolist()
            assert two.tolist() == relayed(2 * x, comm.size, 3).tolist()
            assert three.tolist() == relayed(3 * x, comm.size).tolist()
        (one.sum() + three.sum()).backward()
        two.sum().backward()
    if other != comm.rank:
        assert comm.recv(other).tolist() == [float(other)]


@ranks(4, on=("threads", "mpi"))
def test_a_sub_communicator_counts_its_own_ranks(comm):
    pair = comm.split(comm.rank % 2, comm.rank)
    chain = relay(pair)
    x = torch.full((1, 2), float(comm.rank % 2), dtype=torch.float64)
    y = chain(x)
    if pair.rank == 1:
        assert y.tolist() == relayed(x, 2).tolist()
    y.sum().backward()


@ranks(2, 3, on="threads")
def test_a_deep_copy_is_another_model_on_the_same_ranks(comm):
    chain = relay(comm)
    x = torch.ones(1, 2, dtype=torch.float64)
    chain(x).sum().backward()
    twin = copy.deepcopy(chain)
    assert twin.comm is comm and twin[0] is not chain[0]
    chain.zero_grad()
    y = twin(x)
    if comm.rank == comm.size - 1:
        assert y.tolist() == relayed(x, comm.size).tolist()
    y.sum().backward()
    assert chain[0].weight.grad is None and twin[0].weight.grad is not None


@ranks(2, on="threads")
def test_an_unpickled_chain_asks_for_its_communicator(comm):
    restored = pickle.loads(pickle.dumps(relay(comm)))
    with pytest.raises(ArgumentError, match="assign one"):
        restored(torch.ones(1, 2))
    restored.comm = comm
    x = torch.ones(1, 2, dtype=torch.float64)
    y = restored(x)
    if comm.rank == 1:
        assert y.tolist() == relayed(x, 2).tolist()
    y.sum().backward()


class Counts(nn.Module):
    """A payload whose structure and dtype change from call to call."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.calls += 1
        y = x * self.weight
        return [y, (y,), {"n": self.calls, "x": [y]}, y, (y, 1), (y, True), (None,), ()][self.calls - 1]


@ranks(2, on=("threads", "mpi", "gloo"))
def test_the_structure_of_a_payload_may_change_from_call_to_call(comm):
    chain = MultiNodeChainList(comm)
    chain.add_link(*((Counts(), None, 1) if comm.rank == 0 else (nn.Identity(), 0, None)))
    x = torch.tensor([1.0, 2.0])
    expected = [x, (x,), {"n": 3, "x": [x]}, x, (x, 1), (x, True), (None,), ()]
    for value in expected:
        got = chain(x)
        if comm.rank == 1:
            assert repr(plain(got)) == repr(plain(value))


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return type(value)(plain(item) for item in value) if isinstance(value, list | tuple) else value


@ranks(2, on=("threads", "mpi", "gloo"))
def test_large_crossing_payloads(comm):
    """8 MB, sent by both ranks before either receives."""
    chain = MultiNodeChainList(comm)
    chain.add_link(nn.Linear(1, 1), None, 1 - comm.rank)
    chain.add_link(nn.Identity(), 1 - comm.rank, None)
    nn.init.constant_(chain[0].weight, comm.rank + 1.0)
    nn.init.constant_(chain[0].bias, 0.0)
    y = chain(torch.ones(1 << 21, 1))
    assert (y == 2.0 - comm.rank).all()
    y.mean().backward()
    assert chain[0].weight.grad.item() == pytest.approx(1.0, rel=1e-4)


@ranks(2, on=("threads", "mpi", "gloo"))
def test_large_payloads(comm):
    """Two of 8 MB for each micro-batch: more than fits a slot of memory that ranks of a host share."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.constant_(weight.weight, 2.0)
    chain = MultiNodeChainList(comm, microbatches=2)
    chain.add_link(*((weight, None, [1, 1]) if comm.rank == 0 else (Sum(), [0, 0], None)))
    y = chain(torch.ones(4, 1 << 20, 1))
    if comm.rank == 1:
        assert y.shape == (4, 1 << 20, 1) and (y == 4.0).all()
    (y.mean() if comm.rank else y).backward()
    if comm.rank == 0:
        assert weight.weight.grad.item() == pytest.approx(2.0, rel=1e-4)


class Sum(nn.Module):
    def forward(self, *arguments):
        return sum(arguments)


@ranks(2, on="threads")
def test_a_compiled_chain_has_the_numbers_of_the_plain_one(comm):
    chain = MultiNodeChainList(comm)
    chain.add_link(nn.Linear(4, 4), rank_in=None if comm.rank == 0 else 0, rank_out=1 if comm.rank == 0 else None)
    with torch.no_grad():
        for p in chain.parameters():
            p.copy_(torch.arange(float(p.numel())).view(p.shape).cos())
    compiled = torch.compile(chain, backend="aot_eager")
    found = []
    for called in (chain, compiled):
        y = called(torch.ones(5, 4)) if comm.rank == 0 else called()
        y.sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in chain.parameters())])
        chain.zero_grad()
    torch.testing.assert_close(found[1], found[0])
