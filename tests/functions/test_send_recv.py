"""send and recv: values, and gradients that equal those of the same program on one rank."""

import gc
from contextlib import nullcontext
from threading import Thread

import pytest
import torch

import torchmn
from tests._worlds import ranks
from tests.functions.second_derivative import assert_gradient_of_gradient
from torchmn import functions as F


def around(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def leaf(*shape, seed=0, dtype=torch.float64):
    return numbers(*shape, seed=seed, dtype=dtype).requires_grad_()


@ranks(2, 3, 4)
def test_sending_around_a_ring_has_an_exact_adjoint(comm):
    right, left = around(comm)
    x, y = leaf(4, 3, seed=comm.rank), numbers(4, 3, seed=100 + comm.rank)
    phi = F.send(x, comm, right)
    received = F.recv(comm, left, delegate_variable=phi)
    assert torch.equal(received.detach(), numbers(4, 3, seed=left))
    (received * y).sum().backward()
    there = comm.allreduce((received.detach() * y).sum())
    assert x.grad is not None
    back = comm.allreduce((x.detach() * x.grad).sum())
    torch.testing.assert_close(there, back)


@ranks(2, 3, 4)
def test_the_ring_whose_gradient_is_silently_wrong_elsewhere_is_right(comm):
    """Each rank adds what its neighbour sent to what it kept: both uses of x count."""
    right, left = around(comm)
    for step in range(100):
        x = leaf(5, seed=comm.rank)
        phi = F.send(x, comm, right)
        total = x + F.recv(comm, left, delegate_variable=phi)
        (total.square() * (comm.rank + 1)).sum().backward()
        mine = [numbers(5, seed=rank) for rank in range(comm.size)]
        expected = 2 * (comm.rank + 1) * (mine[comm.rank] + mine[left]) + 2 * (right + 1) * (
            mine[right] + mine[comm.rank]
        )
        torch.testing.assert_close(x.grad, expected, msg=lambda text, step=step: f"step {step}: {text}")


@ranks(2, on=["threads", "mpi", "gloo"])
@ranks(2, on="openmpi")
def test_values_of_every_size_go_there_and_their_gradients_come_back(comm):
    for length in (0, 1, 100, 20_000, 300_000, 3_000_000):
        x = leaf(length, seed=length, dtype=torch.float32)
        weight = numbers(length, seed=1, dtype=torch.float32)
        if comm.rank == 0:
            F.send(x, comm, 1).backward()
            assert torch.equal(x.grad, weight), length
        else:
            received = F.recv(comm, 0)
            assert torch.equal(received, x)
            (received * weight).sum().backward()


@ranks(2, on="threads")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_every_floating_dtype_keeps_its_dtype_there_and_back(comm, dtype):
    x = torch.tensor([1.5, -2.0, 3.0], dtype=dtype, requires_grad=True)
    if comm.rank == 0:
        F.send(x, comm, 1).backward()
        assert x.grad.dtype == dtype
        assert torch.equal(x.grad, torch.tensor([3.0, 3.0, 3.0], dtype=dtype))
    else:
        received = F.recv(comm, 0)
        assert received.dtype == dtype and torch.equal(received, x)
        (received * 3).sum().abs().backward() if dtype.is_complex else (received * 3).sum().backward()


@ranks(2)
def test_integers_and_bools_can_be_sent_with_floats_and_have_no_gradient(comm):
    x = leaf(3)
    if comm.rank == 0:
        F.send((torch.arange(4), x * 2, torch.tensor([True, False])), comm, 1).backward()
        assert torch.equal(x.grad, torch.full((3,), 10.0, dtype=torch.float64))
    else:
        counts, value, flags = F.recv(comm, 0)
        assert counts.tolist() == [0, 1, 2, 3] and flags.tolist() == [True, False]
        assert not counts.requires_grad and not flags.requires_grad and value.requires_grad
        (value * 5).sum().backward()


@ranks(2)
def test_what_needs_no_gradient_costs_none_and_its_delegate_can_be_called_backward_on(comm):
    for x in (torch.arange(5), torch.ones(3), torch.tensor(True)):
        if comm.rank == 0:
            phi = F.send(x, comm, 1)
            assert phi.dim() == 0 and phi.item() == 0.0 and phi.dtype.is_floating_point
            phi.backward()
        else:
            received = F.recv(comm, 0)
            assert torch.equal(received, x) and received.requires_grad == received.is_floating_point()
            if received.requires_grad:
                received.sum().backward()


@ranks(3)
def test_ranks_without_parameters_can_call_backward_on_what_was_sent_without_a_gradient(comm):
    """Rank 0 sends data, rank 1 passes it on, rank 2 computes a loss."""
    y = 2 * F.recv(comm, comm.rank - 1) if comm.rank > 0 else torch.ones(3)
    end = F.send(y, comm, comm.rank + 1) if comm.rank < 2 else y.sum()
    end.backward()
    assert end.item() == (12 if comm.rank == 2 else 0)
    comm.barrier()


@ranks(2, on="threads")
def test_a_value_that_needs_no_gradient_still_carries_the_delegate(comm):
    x = leaf(3)
    if comm.rank == 0:
        phi = F.send(x, comm, 1)
        F.recv(comm, 1, delegate_variable=phi).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0, dtype=torch.float64))
    else:
        received = F.recv(comm, 0)
        F.send(torch.ones(2), comm, 0)
        (received * 2).sum().backward()


@ranks(2)
def test_tuples_arrive_as_tuples_and_lists_too(comm):
    pair = (leaf(2, 3, seed=1), leaf(0, 4, seed=2))
    if comm.rank == 0:
        delegates = F.send(pair, comm, 1), F.send([pair[0]], comm, 1), F.send(pair[1], comm, 1)
        sum(delegates).backward()
        assert torch.equal(pair[0].grad, torch.full((2, 3), 3.0, dtype=torch.float64))
        assert pair[1].grad.shape == (0, 4)
    else:
        received = F.recv(comm, 0)
        single = F.recv(comm, 0)
        forced = F.recv(comm, 0, force_tuple=True)
        assert [len(each) for each in (received, single, forced)] == [2, 1, 1]
        assert received[1].shape == (0, 4)
        (received[0].sum() + 2 * single[0].sum() + received[1].sum() + forced[0].sum()).backward()


@ranks(2)
def test_elements_of_a_tuple_that_the_loss_does_not_use_get_zeros(comm):
    x, y = leaf(2, seed=1), leaf(3, seed=2)
    if comm.rank == 0:
        F.send((x, y), comm, 1).backward()
        assert torch.equal(x.grad, torch.zeros(2, dtype=torch.float64))
        assert torch.equal(y.grad, torch.ones(3, dtype=torch.float64))
    else:
        F.recv(comm, 0)[1].sum().backward()


@ranks(2)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
@pytest.mark.parametrize("tags", [(0, 0, 0), (5, 3, 5)])
def test_backward_may_visit_the_edges_between_two_ranks_in_any_order(comm, order, tags):
    xs = [leaf(3, seed=n) for n in range(3)]
    if comm.rank == 0:
        delegates = [F.send(x * (n + 1), comm, 1, tag) for n, (x, tag) in enumerate(zip(xs, tags, strict=True))]
        for n in order:
            delegates[n].backward()
        for n, x in enumerate(xs):
            assert torch.equal(x.grad, torch.full((3,), (n + 1) * 10.0**n, dtype=torch.float64)), n
    else:
        received = [F.recv(comm, 0, tag=tag) for tag in tags]
        for n in reversed(range(3)):
            (received[n] * 10**n).sum().backward()


@ranks(2, on=["threads", "mpi"])
def test_two_threads_of_a_rank_may_wait_for_gradients_at_once(comm):
    """As on GPUs. The second gradient comes first, and the first only after the second one's thread has gone on."""
    xs = [leaf(3, seed=n) for n in range(2)]
    if comm.rank == 0:
        delegates = [F.send(x, comm, 1) for x in xs]

        def second():
            delegates[1].backward()
            comm.send(torch.ones(1), 1, tag=5)

        thread = Thread(target=second)
        thread.start()
        delegates[0].backward()
        thread.join()
        assert [x.grad.tolist() for x in xs] == [[1.0] * 3, [2.0] * 3]
    else:
        received = [F.recv(comm, 0) for _ in xs]
        (received[1] * 2).sum().backward()
        comm.recv(0, tag=5)
        received[0].sum().backward()


@ranks(2)
def test_a_delegate_added_to_a_loss_does_not_change_it(comm):
    x = leaf(3)
    if comm.rank == 0:
        phi = F.send(x * 2, comm, 1)
        loss = x.sum()
        assert (loss + phi).item() == loss.item()
        (loss + phi).backward()
        assert torch.equal(x.grad, torch.full((3,), 5.0, dtype=torch.float64))
    else:
        (F.recv(comm, 0) * 2).sum().backward()


@ranks(2)
def test_there_and_back_again_is_differentiated_through_both_ranks(comm):
    """rank 0: a(x) -> rank 1: b(.) -> rank 0: c(.); every weight gets the gradient of the whole."""
    weights = [leaf(4, 4, seed=n) for n in range(3)]
    x = leaf(2, 4, seed=9)
    h = x
    for weight in weights:
        h = (h @ weight).tanh()
    expected = torch.autograd.grad(h.square().sum(), [x, *weights])
    if comm.rank == 0:
        phi = F.send((x @ weights[0]).tanh(), comm, 1)
        h = F.recv(comm, 1, delegate_variable=phi)
        (h @ weights[2]).tanh().square().sum().backward()
        for mine, right in ((x, 0), (weights[0], 1), (weights[2], 3)):
            torch.testing.assert_close(mine.grad, expected[right])
    else:
        F.send((F.recv(comm, 0) @ weights[1]).tanh(), comm, 0).backward()
        torch.testing.assert_close(weights[1].grad, expected[2])


@ranks(3)
def test_on_a_sub_communicator_ranks_are_its_own(comm):
    pair = comm.split(0 if comm.rank != 1 else None, -comm.rank)
    if pair is None:
        return
    x = leaf(2)
    if comm.rank == 2:  # rank 0 of the pair
        F.send(x, pair, 1).backward()
        assert torch.equal(x.grad, torch.full((2,), 7.0, dtype=torch.float64))
    else:
        (F.recv(pair, 0) * 7).sum().backward()
    pair.finalize()


@ranks(2)
def test_backward_twice_through_a_retained_graph_adds_the_gradient_twice(comm):
    x = leaf(3)
    for again in (True, False):
        if comm.rank == 0:
            phi = F.send(x, comm, 1) if again else phi  # noqa: F821
            phi.backward(retain_graph=again)
        else:
            loss = (F.recv(comm, 0) * 2).sum() if again else loss  # noqa: F821
            loss.backward(retain_graph=again)
    if comm.rank == 0:
        assert torch.equal(x.grad, torch.full((3,), 4.0, dtype=torch.float64))


@ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("who", ["both", "receiver", "sender"])
def test_without_gradients_only_values_are_sent(comm, mode, who):
    x = leaf(3)
    if comm.rank == 0:
        with mode() if who != "receiver" else nullcontext():
            phi = F.send(x * 2, comm, 1)
        assert phi.requires_grad == (who == "receiver")
        if phi.requires_grad:
            phi.backward()  # the receiver has declined the edge
        assert x.grad is None or not x.grad.any()
    else:
        with mode() if who != "sender" else nullcontext():
            received = F.recv(comm, 0)
        assert torch.equal(received, x * 2) and received.requires_grad == (who == "sender")
    comm.barrier()


@ranks(2)
def test_a_value_that_is_deleted_has_no_gradient_and_its_sender_does_not_wait(comm):
    x = leaf(3)
    if comm.rank == 0:
        thrown, used = F.send(x, comm, 1), F.send(x, comm, 1)
        (thrown + used).backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0, dtype=torch.float64))
    else:
        F.recv(comm, 0).mean()
        gc.collect()
        (F.recv(comm, 0) * 3).sum().backward()
    comm.barrier()


@ranks(2)
def test_a_plain_recv_of_the_communicator_gives_no_gradient_and_keeps_nobody_waiting(comm):
    x = leaf(3)
    if comm.rank == 0:
        F.send(x, comm, 1).backward()
        assert x.grad is None
        comm.send(torch.ones(2), 1)
    else:
        assert torch.equal(comm.recv(0), x)
        F.recv(comm, 0).sum().backward()
    comm.barrier()


@ranks(2)
def test_an_evaluation_without_no_grad_between_two_training_steps_is_harmless(comm):
    x, kept = leaf(3), []
    for _ in range(3):
        if comm.rank == 0:
            F.send(x, comm, 1)  # evaluation: there is no backward, and the delegate is deleted
            F.send(x, comm, 1).backward()
        else:
            kept.append(F.recv(comm, 0).sum())
            F.recv(comm, 0).sum().backward()
    if comm.rank == 0:
        assert torch.equal(x.grad, torch.full((3,), 3.0, dtype=torch.float64))


@ranks(2)
def test_the_sender_may_change_its_tensor_at_once_and_the_receiver_its_own(comm):
    for shape in ((3,), (2, 3), (), (0, 2), (300, 400)):  # a received tensor of several dims must be no view either
        x = leaf(*shape)
        if comm.rank == 0:
            h = x * 2
            phi = F.send((h, h), comm, 1)
            h.detach().zero_()
            phi.backward()
            assert torch.equal(x.grad, torch.full(shape, 8.0, dtype=torch.float64))
        else:
            received = F.recv(comm, 0)
            for y in received:
                y.mul_(2)
                assert torch.equal(y, x * 4)
            sum(received).sum().backward()


@ranks(2)
def test_the_gradient_of_a_gradient_crosses_ranks(comm):
    assert_gradient_of_gradient(comm, leaf(4, seed=3))


@ranks(2, on="threads")
def test_wrong_arguments_are_refused_by_name(comm):
    cases = [
        (lambda: F.send(torch.ones(1), comm, comm.rank), "got this rank itself"),
        (lambda: F.recv(comm, comm.rank), "got this rank itself"),
        (lambda: F.send(torch.ones(1), comm, 2), r"expected rank in 0..1, got 2"),
        (lambda: F.recv(comm, 0 if comm.rank else 1, tag=-1), "expected tag"),
        (lambda: F.recv(comm, 0 if comm.rank else 1, delegate_variable=3), "expected delegate_variable"),
        (lambda: F.send(comm, torch.ones(3), 1), r"as in F.send\(x, comm, rank\), got a torch.float32 tensor of shape"),
        (lambda: F.send(comm, torch.ones(3), 1), rf"^rank {comm.rank} of 2: .* a communicator as x: put them in that"),
        (lambda: F.send(torch.ones(3), 1, comm), r"got 1, and a communicator as rank: put them in that order"),
        (
            lambda: F.recv(0, comm),
            rf"^rank {comm.rank} of 2: .* as in F.recv\(comm, rank\), got 0, and a comm.* as rank",
        ),
        (lambda: F.recv(0, 1), r"^expected comm to be a communicator, as in F.recv\(comm, rank\), got 0$"),
    ]
    for call, text in cases:
        with pytest.raises(torchmn.ArgumentError, match=text):
            call()


@ranks(2)
def test_a_sender_that_can_not_send_raises_on_the_receiver_too(comm):
    if comm.rank == 0:
        with pytest.raises(torchmn.ArgumentError, match="expected a tensor, got 'text'"):
            F.send((torch.ones(1), "text"), comm, 1)
    else:
        with pytest.raises(torchmn.PeerError, match="expected a tensor, got 'text'"):
            F.recv(comm, 0)


@ranks(2)
def test_an_object_is_not_a_tensor(comm):
    if comm.rank == 0:
        comm.send_obj({"a": 1}, 1)
    else:
        with pytest.raises(torchmn.TorchMNError, match="recv_obj"):
            F.recv(comm, 0)
