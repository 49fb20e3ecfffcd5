"""Communication inside parts that torch.utils.checkpoint computes twice."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchmn
from tests._worlds import ranks
from torchmn import functions as F
from torchmn.errors import RecomputeError


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def gradients(comm, run, steps=2):
    """The gradient of a weight on this rank after a ring of exchanges, each inside a part that `run` runs."""
    weight = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3).requires_grad_()
    right, left = around(comm)

    def part(x):
        h = (x @ weight).tanh()
        phi = F.send(h, comm, right)
        received = F.recv(comm, left, delegate_variable=phi)
        return torch.relu_(received * 1.5).sin() @ weight

    x = torch.linspace(0, 1, 6, dtype=torch.float64).view(2, 3) * (comm.rank + 1)
    for _ in range(steps):
        x = run(part, x)
    x.square().sum().backward()
    return weight.grad


@ranks(2, 3, on="threads")
@ranks(2, on=["mpi", "gloo"])
def test_a_part_that_keeps_its_messages_has_the_gradients_of_one_that_is_not_recomputed(comm):
    expected = gradients(comm, lambda part, x: part(x))
    kept = gradients(comm, lambda part, x: checkpoint(part, x, use_reentrant=False, context_fn=F.keep_messages))
    torch.testing.assert_close(kept, expected, rtol=0, atol=0)


@ranks(2, on="threads")
def test_only_one_of_the_ranks_may_recompute(comm):
    expected = gradients(comm, lambda part, x: part(x))

    def run(part, x):
        if comm.rank == 1:
            return part(x)
        return checkpoint(part, x, use_reentrant=False, context_fn=F.keep_messages)

    torch.testing.assert_close(gradients(comm, run), expected, rtol=0, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_without_it_a_recomputed_message_is_refused_before_it_is_sent(reentrant):
    def body(comm):
        def run(part, x):
            return checkpoint(part, x.requires_grad_(), use_reentrant=reentrant)

        gradients(comm, run, steps=1)

    with pytest.raises(RecomputeError, match=r"context_fn=torchmn\.functions\.keep_messages"):
        torchmn.run_threads(body, 2, timeout=10)


@ranks(2, on="threads")
def test_communication_outside_of_the_checkpointed_part_needs_nothing(comm):
    weights = [torch.full((2, 2), 0.5 + n, requires_grad=True) for n in range(2)]
    x = torch.ones(1, 2)
    expected = torch.autograd.grad(((x @ weights[0]).tanh() @ weights[1]).tanh().sum(), weights)

    def part(x):
        return (x @ weights[comm.rank]).tanh()

    if comm.rank == 0:
        F.send(checkpoint(part, x, use_reentrant=False), comm, 1).backward()
    else:
        checkpoint(part, F.recv(comm, 0), use_reentrant=False).sum().backward()
    torch.testing.assert_close(weights[comm.rank].grad, expected[comm.rank])


@ranks(2, on="threads")
@pytest.mark.parametrize("second", ["another tag", "a collective", "one more"])
def test_a_part_that_is_recomputed_in_another_way_gets_no_other_value(comm, second):
    calls = []

    def part(x):
        calls.append(None)
        again = len(calls) > 1
        if comm.rank == 0:
            if again and second == "a collective":
                return F.allreduce(comm, x).sin()
            y = F.recv(comm, 1, tag=2 if again and second == "another tag" else 1)
            if again and second == "one more":
                y = y + F.recv(comm, 1, tag=1)
            return (x * y).sin()
        return x + F.send(x * 2, comm, 0, tag=1)

    x = torch.ones(3, requires_grad=True)
    if comm.rank == 1:
        part(x).sum().backward()
        return
    y = checkpoint(part, x, use_reentrant=False, context_fn=F.keep_messages)
    with pytest.raises(RecomputeError, match=r"rank 0 of 2: .* expects a .* forward had (a message|nothing more)"):
        y.sum().backward()
