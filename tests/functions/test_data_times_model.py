"""Data times model on one world: pairs of ranks hold one model, and train as one rank does on the whole batch."""

import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from torchmn import functions as F

STEPS, BATCH = 10, 8


def layers():
    """The same two layers on every rank, whose threads share torch's random state."""
    model = [nn.Linear(3, 5, dtype=torch.float64), nn.Linear(5, 2, dtype=torch.float64)]
    generator = torch.Generator().manual_seed(0)
    for parameter in [p for layer in model for p in layer.parameters()]:
        nn.init.uniform_(parameter, -1, 1, generator)
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, BATCH, 3, dtype=torch.float64, generator=generator)


def trained_alone():
    first, last = layers()
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1, momentum=0.9)
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = last(first(x).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [first, last]


@ranks(2, 4, on="threads")
@ranks(4, on=["mpi", "gloo"])
def test_every_step_has_the_loss_of_one_rank_on_the_whole_batch(comm):
    model_axis = comm.split(comm.rank // 2, comm.rank)
    data_axis = comm.split(comm.rank % 2, comm.rank)
    part = layers()[model_axis.rank]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    optimizer = torchmn.create_multi_node_optimizer(optimizer, data_axis, model=part)
    expected_losses, expected = trained_alone()
    for x, expected_loss in zip(batches(), expected_losses, strict=True):
        optimizer.zero_grad()
        if model_axis.rank == 0:
            loss = F.send(part(x.chunk(data_axis.size)[data_axis.rank]).tanh(), model_axis, 1)
        else:
            loss = part(F.recv(model_axis, 0)).square().mean()
        loss.backward()
        optimizer.step()
        if model_axis.rank == 1:
            mean = data_axis.allreduce(loss.detach(), "mean")
            torch.testing.assert_close(mean.item(), expected_loss, rtol=1e-10, atol=0)
    for mine, right in zip(part.parameters(), expected[model_axis.rank].parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)
    model_axis.finalize()
    data_axis.finalize()
