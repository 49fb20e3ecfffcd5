"""Delegates: backward goes through a rank's messages in reverse, and adds nothing to any gradient."""

import torch

from torchmn.graph.delegates import attach, blank, join


class Recv(torch.autograd.Function):
    """Replaces a message that was received: records its gradient, which the real one sends."""

    @staticmethod
    def forward(ctx, name, seen, delegate, x):
        ctx.name, ctx.seen = name, seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append((ctx.name, gradient.tolist()))
        return None, None, None, gradient


class Send(torch.autograd.Function):
    """Replaces a message that was sent: records that it would wait now, and gets ones as its gradient."""

    @staticmethod
    def forward(ctx, name, seen, x):
        ctx.name, ctx.seen = name, seen
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):
        ctx.seen.append((ctx.name, None))
        return None, None, torch.ones(2)


def rank(seen: list, steps: int, weight: torch.Tensor, ignores: int | None = None) -> torch.Tensor:
    """The delegate of a rank that receives, computes and sends, `steps` times; one result may ignore its input."""
    delegate = None
    for n in range(steps):
        y = Recv.apply(f"recv {n}", seen, delegate, torch.ones(2, requires_grad=True))
        delegate = join(None, (y,))
        z = weight * 1 if n == ignores else y * weight
        delegate = join(delegate, (Send.apply(f"send {n}", seen, z),))
    assert delegate is not None
    return delegate


def test_backward_visits_messages_in_reverse_also_those_that_nobody_used():
    seen, weight = [], torch.tensor([2.0, 3.0], requires_grad=True)
    delegate = rank(seen, 3, weight, ignores=1)
    assert delegate.shape == () and delegate == 0
    delegate.backward()
    used = [2.0, 3.0]
    assert seen == [
        *[("send 2", None), ("recv 2", used), ("send 1", None)],
        *[("recv 1", [0.0, 0.0]), ("send 0", None), ("recv 0", used)],
    ]
    assert weight.grad.tolist() == [3.0, 3.0]


def test_an_output_carries_the_delegate_and_keeps_its_own_gradient():
    seen, weight = [], torch.tensor([2.0, 3.0], requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    used, unused, index = attach(rank(seen, 1, weight), [x * 5, x * 7, torch.tensor([1, 2])])
    assert (used.tolist(), unused.tolist(), index.tolist()) == ([5.0, 5.0], [7.0, 7.0], [1, 2])
    used.sum().backward()
    assert [name for name, _ in seen] == ["send 0", "recv 0"]
    assert x.grad.tolist() == [5.0, 5.0]


def test_without_anything_to_wait_for_nothing_changes():
    x = torch.ones(2)
    assert join(None, (x,)) is None
    delegate = blank()
    assert join(delegate, (x,)) is delegate
    assert attach(None, [x])[0] is x
    only_integers = [torch.tensor([1])]
    assert attach(delegate, only_integers) is only_integers
    delegate.backward()
    with torch.no_grad():
        assert not blank().requires_grad
