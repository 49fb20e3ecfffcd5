"""pseudo_connect: values as they were, and a backward that also visits the delegate."""

import pickle
import re

import pytest
import torch

import torchmn
from tests._worlds import ranks
from torchmn import functions as F


def visited(y):
    """Whether backward from `y` visits a delegate that was joined to it."""
    calls = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.zeros(())

        @staticmethod
        def backward(ctx, gradient):
            calls.append(gradient)

    joined = F.pseudo_connect(Note.apply(torch.zeros((), requires_grad=True)), *y)
    return joined, calls


def test_one_in_one_out_and_several_in_a_tuple_out():
    x, y = torch.randn(2), torch.arange(3)
    one, calls = visited([x])
    assert torch.equal(one, x) and one.requires_grad
    one.sum().backward()
    assert len(calls) == 1
    several, calls = visited([x, y])
    assert isinstance(several, tuple) and torch.equal(several[0], x) and torch.equal(several[1], y)
    assert not several[1].requires_grad
    several[0].sum().backward()
    assert len(calls) == 1


def test_gradients_pass_through_unchanged():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def function(x, y):
        return F.pseudo_connect(torch.zeros((), requires_grad=True), x.sin(), y * x[0])

    assert torch.autograd.gradcheck(function, (x, y))
    assert torch.autograd.gradgradcheck(function, (x, y))


def test_what_was_joined_may_be_changed_in_place():
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    joined, calls = visited([x * 1])
    torch.relu_(joined)
    joined.sum().backward()
    assert x.grad.tolist() == [0.0, 1.0] and len(calls) == 1


@pytest.mark.parametrize("phi", [None, torch.zeros(())])
def test_without_a_delegate_to_visit_the_values_are_returned_as_they_are(phi):
    x = torch.randn(2)
    assert torch.equal(F.pseudo_connect(phi, x), x) and F.pseudo_connect(phi, x).data_ptr() == x.data_ptr()
    assert not F.pseudo_connect(phi, x, x)[0].requires_grad


@pytest.mark.parametrize("phi", [None, torch.zeros(()), torch.zeros((), requires_grad=True)])
@pytest.mark.parametrize("shape", [(), (1,), (1, 3), (2, 3)], ids=str)
def test_the_result_for_one_variable_unpacks_as_chainermn_s_tuple_of_one(phi, shape):
    for x in (torch.ones(shape), torch.ones(shape, requires_grad=True), torch.nn.Parameter(torch.ones(shape))):
        (unpacked,) = F.pseudo_connect(phi, x)
        (again,) = unpacked
        assert torch.equal(unpacked, x) and torch.equal(again, x)
        assert unpacked.requires_grad == (x.requires_grad or (phi is not None and phi.requires_grad))
        with pytest.raises(ValueError, match="not enough values to unpack"):
            _first, _second = F.pseudo_connect(phi, x)
        for index in (0, -1):
            with pytest.raises(
                torchmn.ArgumentError, match=rf"{re.escape(str(shape))}, could .* x\.select\(0, {index}\)"
            ):
                F.pseudo_connect(phi, x)[index]


def test_an_unpacked_result_leads_backward_to_the_delegate():
    (one,), calls = visited([torch.randn(2, 3)])
    one.sum().backward()
    assert len(calls) == 1


def test_what_is_computed_from_the_result_is_a_plain_tensor():
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    joined = F.pseudo_connect(torch.zeros((), requires_grad=True), x)
    results = [
        joined + 1,
        joined[:1],
        joined[1],
        joined[0, 1],
        joined.detach(),
        joined.view(3, 2),
        torch.cat([joined, joined]),
        joined.sum(),
    ]
    assert {type(result) for result in results} == {torch.Tensor}
    assert [row.tolist() for row in joined.unbind()] == x.tolist() and isinstance(joined, torch.Tensor)
    assert pickle.loads(pickle.dumps(joined.detach())).tolist() == x.tolist()


@ranks(2)
def test_the_result_can_be_sent_as_any_tensor(comm):
    joined = F.pseudo_connect(torch.zeros((), requires_grad=True), torch.full((1, 2), comm.rank + 1.0))
    assert comm.allreduce(joined).tolist() == [[3.0, 3.0]]
    assert F.allgather(comm, joined)[1].tolist() == [[2.0, 2.0]]
    assert [x.tolist() for x in comm.allgather_obj(joined.detach())] == [[[1.0, 1.0]], [[2.0, 2.0]]]


def test_a_delegate_needs_something_that_can_carry_it():
    phi = torch.zeros((), requires_grad=True)
    with pytest.raises(torchmn.ArgumentError, match=r"floating-point tensor to carry the delegate, got a torch\.int64"):
        F.pseudo_connect(phi, torch.arange(3))
    with pytest.raises(torchmn.ArgumentError, match="got none"):
        F.pseudo_connect(phi)
    with pytest.raises(torchmn.ArgumentError, match="got 3 at place 1"):
        F.pseudo_connect(phi, torch.zeros(1), 3)
    with pytest.raises(torchmn.ArgumentError, match="expected delegate_variable to be a tensor or None"):
        F.pseudo_connect("phi", torch.zeros(1))


@ranks(2)
def test_two_sends_of_which_one_delegate_is_returned_are_joined(comm):
    x = torch.ones(3, requires_grad=True)
    if comm.rank == 0:
        first = F.send(x * 2, comm, 1)
        second = F.send(x * 3, comm, 1)
        F.pseudo_connect(first, second).backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0 * 10 + 3.0 * 100))
    else:
        (F.recv(comm, 0) * 10 + F.recv(comm, 0) * 100).sum().backward()


@ranks(2)
def test_an_output_in_the_middle_is_joined_to_the_send_that_follows_it(comm):
    x = torch.ones(3, requires_grad=True)
    if comm.rank == 0:
        output = x * 2
        phi = F.send(x * 3, comm, 1)
        F.pseudo_connect(phi, output).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0 + 30.0))
    else:
        (F.recv(comm, 0) * 10).sum().backward()
