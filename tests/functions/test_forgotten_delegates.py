"""A `send` that backward should have visited and did not: an error that names both lines, never a wrong gradient.

Here the ranks are threads; tests/mpi/test_unjoined_gradients.py does the same to jobs of processes.
"""

import re

import pytest
import torch

import torchmn
from torchmn import functions as F
from torchmn.errors import DelegateError
from torchmn.functions import edges_of


def both_lines(error):
    """The function names at the end of the two lines that the error names."""
    return re.findall(r"test_forgotten_delegates\.py:\d+ in (\w+)", str(error.value))


def there(x, comm):
    return F.send(x, comm, 1)


def here(comm, rank=0):
    return F.recv(comm, rank)


def forgets_the_delegate(comm):
    """D1: send ... recv on one rank, and the delegate is not passed to recv."""
    x = torch.ones(3, requires_grad=True)
    if comm.rank == 0:
        there(x * 2, comm)
        F.recv(comm, 1).sum().backward()
        return x.grad
    F.send(here(comm) * 3, comm, 0).backward()
    return None


def drops_the_last_send(comm):
    """D2: a model that ends in a send, whose delegate is not returned."""
    x = torch.ones(3, requires_grad=True)
    if comm.rank == 0:
        there(x * 2, comm)
    else:
        here(comm).sum().backward()


def joins_only_the_last_of_two_sends(comm):
    """D3."""
    x = torch.ones(3, requires_grad=True)
    if comm.rank == 0:
        there(x * 2, comm)
        F.send(x * 3, comm, 1).backward()
    else:
        (here(comm) * F.recv(comm, 0)).sum().backward()


def returns_an_output_without_the_send_behind_it(comm):
    """D4."""
    x = torch.ones(3, requires_grad=True)
    if comm.rank == 0:
        output = F.recv(comm, 1) * x
        there(output * 2, comm)
        output.sum().backward()
    else:
        phi = F.send(x * 2, comm, 0)
        (here(comm).sum() + phi).backward()


def goes_around_a_ring_without_delegates(comm):
    """All ranks reply and none waits: the gradient would be silently wrong."""
    x = torch.ones(3, requires_grad=True)
    F.send(x, comm, (comm.rank + 1) % comm.size)
    (x + F.recv(comm, (comm.rank - 1) % comm.size)).sum().backward()


@pytest.mark.parametrize(
    "wrong",
    [
        forgets_the_delegate,
        drops_the_last_send,
        joins_only_the_last_of_two_sends,
        returns_an_output_without_the_send_behind_it,
    ],
    ids=["D1", "D2", "D3", "D4"],
)
def test_a_forgotten_send_is_an_error_that_names_its_line_and_the_line_of_its_recv(wrong):
    with pytest.raises(DelegateError, match="rank 0 of 2: backward did not visit the send to rank 1, tag 0") as error:
        torchmn.run_threads(wrong, 2, timeout=10)
    assert both_lines(error) == ["there", "here"]
    assert "pseudo_connect(phi, y)" in str(error.value)


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_without_delegates_is_refused(size):
    with pytest.raises(DelegateError) as error:
        torchmn.run_threads(goes_around_a_ring_without_delegates, size, timeout=10)
    assert both_lines(error) == ["goes_around_a_ring_without_delegates"] * 2


@pytest.mark.parametrize("wrong", [forgets_the_delegate, joins_only_the_last_of_two_sends], ids=["D1", "D3"])
def test_it_is_raised_by_that_same_backward(wrong):
    """Before an optimizer could use the gradient."""
    raised = []

    def body(comm):
        try:
            wrong(comm)
        except DelegateError:
            raised.append(comm.rank)
        edges_of(comm).sent.clear()

    torchmn.run_threads(body, 2, timeout=10)
    assert raised == [0]


def test_a_delegate_that_stays_alive_unused_is_found_at_the_end():
    def body(comm):
        x = torch.ones(3, requires_grad=True)
        if comm.rank == 0:
            phi = F.send(x, comm, 1)
            comm.barrier()
            return phi
        F.recv(comm, 0).sum().backward()
        comm.barrier()
        return None

    with pytest.raises(DelegateError, match="backward did not visit the send"):
        torchmn.run_threads(body, 2, timeout=10)


def test_a_training_loop_that_never_calls_backward_on_its_delegate_is_stopped_in_the_next_step():
    def body(comm):
        x = torch.ones(3, requires_grad=True)
        for step in range(1000):
            if comm.rank == 0:
                phi = F.send(x, comm, 1)  # noqa: F841
            else:
                F.recv(comm, 0).sum().backward()
            comm.barrier()
            assert step < 2

    with pytest.raises(DelegateError):
        torchmn.run_threads(body, 2, timeout=10)


def test_a_second_backward_on_one_rank_only_is_found_at_the_end():
    def body(comm):
        x = torch.ones(3, requires_grad=True)
        if comm.rank == 0:
            there(x, comm).backward()
        else:
            loss = here(comm).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        comm.barrier()

    with pytest.raises(DelegateError, match=r"rank 1 went through the recv at \S+:\d+ in here in more backwards"):
        torchmn.run_threads(body, 2, timeout=10)


def test_a_value_that_is_alive_and_not_joined_to_the_loss_ends_in_the_table_with_both_lines():
    def body(comm):
        x = torch.ones(3, requires_grad=True)
        if comm.rank == 0:
            there(x, comm).backward()
            return None
        unused = here(comm)
        comm.recv(0, tag=7)
        return unused

    with pytest.raises(torchmn.WaitTimeout) as error:
        torchmn.run_threads(body, 2, timeout=0.5)
    text = str(error.value)
    assert re.search(r"0 +localhost +backward of send +rank 1 +0 ", text)
    assert re.search(r"rank 0 waits for the gradient of what it sent to rank 1 at \S+:\d+ in there;", text)
    assert re.search(r"rank 1 received it at \S+:\d+ in here, and has not run its backward", text)


def test_the_table_shows_that_a_value_was_not_received():
    def body(comm):
        if comm.rank == 0:
            there(torch.ones(3, requires_grad=True), comm).backward()
        else:
            comm.recv(0, tag=7)

    with pytest.raises(torchmn.WaitTimeout, match=r"in there;\n  rank 1 has not received it"):
        torchmn.run_threads(body, 2, timeout=0.5)
