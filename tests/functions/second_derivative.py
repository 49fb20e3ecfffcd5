"""A gradient of a gradient that crosses two ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from torchmn import Communicator
from torchmn import functions as F


def assert_gradient_of_gradient(comm: Communicator, x: Tensor) -> None:
    """Rank 1 computes L = sum(y^3) of y = x sent by rank 0; rank 0 makes M = |dL/dx|^2 of what came back."""
    if comm.rank == 0:
        phi = F.send(x, comm, 1)
        (gradient,) = torch.autograd.grad(phi, x, create_graph=True)
        torch.testing.assert_close(gradient, 3 * x.detach() ** 2)
        (gradient.square().sum() + phi).backward()
        torch.testing.assert_close(x.grad, 36 * x.detach() ** 3)
    else:
        way_back = torch.zeros((), requires_grad=True)
        y = F.recv(comm, 0, delegate_variable=way_back)
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), way_back, create_graph=True)
        gradient.backward()  # zero, and the way to what was sent back
