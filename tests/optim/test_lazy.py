"""Lazy modules: the numbers are those of rank 0's model with shapes, on one process with all batches."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import torchmn
from tests._worlds import ranks

STEPS, ROWS = 3, 4


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    x, t = (torch.randn(ROWS, width, generator=draw, dtype=torch.float64) for width in (5, 2))
    return x, t


def lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Linear(6, 2)).double()


def serial(first: dict, size: int) -> dict:
    """The state after the steps of one process that starts with the state `first`."""
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    model.load_state_dict(first)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(STEPS):
        batches = [batch(step, rank) for rank in range(size)]
        x, t = (torch.cat(parts) for parts in zip(*batches, strict=True))
        optimizer.zero_grad()
        mse_loss(model(x), t).backward()
        optimizer.step()
    return model.state_dict()


@ranks(1, 2, 3)
@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("with_model", [True, False])
def test_lazy_modules_train_as_one_process(comm, options, with_model):
    torch.manual_seed(comm.rank)  # each rank would draw other values
    model = torchmn.create_mnbn_model(lazy_model(), comm)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = torchmn.create_multi_node_optimizer(adam, comm, model=model if with_model else None, **options)
    first = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        x, t = batch(step, comm.rank)
        y = model(x)
        if not first:
            first = {name: value.clone() for name, value in model.state_dict().items()}
            first["1.running_mean"].zero_()
            first["1.running_var"].fill_(1)
            first["1.num_batches_tracked"].zero_()
        mse_loss(y, t).backward()
        optimizer.step()
    first = comm.bcast_obj(first)
    for name, value in serial(first, comm.size).items():
        assert torch.allclose(model.state_dict()[name], value, rtol=1e-9), name
        if name != "1.num_batches_tracked":
            assert len({str(each) for each in comm.allgather_obj(model.state_dict()[name].tolist())}) == 1


@ranks(2, on="threads")
def test_double_buffering_has_lazy_modules_too(comm):
    model = nn.LazyLinear(1).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torchmn.create_multi_node_optimizer(sgd, comm, double_buffering=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, comm.rank)[0]).sum().backward()
        optimizer.step()
    optimizer.flush()
    weights = comm.allgather(model.weight.detach())
    assert torch.equal(weights[0], weights[1])


@ranks(2, on="threads")
def test_a_rank_that_never_runs_the_forward_is_an_error_on_all(comm):
    model = nn.ModuleList([nn.LazyLinear(1), nn.Linear(1, 1)])
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)

    def step() -> None:
        y = model[1](torch.ones(1, 1))
        if comm.rank == 0:
            y = y + model[0](torch.ones(1, 1))
        y.sum().backward()
        optimizer.step()

    with pytest.raises(
        torchmn.MismatchError, match=r"different operations(.|\n)*first forward of a lazy module LazyLin"
    ):
        step()


@ranks(2, on="threads")
def test_a_layer_that_no_rank_has_run_stays_lazy(comm):
    model = nn.ModuleList([nn.LazyLinear(1), nn.Linear(1, 1)])
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
    before = model[1].weight.item()
    model[1](torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert model[1].weight.item() == pytest.approx(before - 0.1)
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert comm.allgather_obj(model[0].weight.tolist()) == [model[0].weight.tolist()] * 2


@ranks(2, on="threads")
def test_a_group_of_lazy_parameters_is_an_error_on_every_rank(comm):
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), comm)
    lazy = nn.LazyLinear(1) if comm.rank == 0 else nn.Linear(1, 1)
    with pytest.raises(torchmn.ArgumentError, match="rank 0 of 2: add_param_group: expected parameters with a shape"):
        optimizer.add_param_group({"params": list(lazy.parameters())})


@ranks(2, on="threads")
def test_an_input_without_a_shape_for_the_layer_raises_on_every_rank(comm):
    model = nn.LazyConv2d(1, 3)
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
    optimizer.zero_grad()
    with pytest.raises(torchmn.ArgumentError, match="rank 1 of 2: first forward of a lazy module LazyConv2d"):
        model(torch.ones(1, 1, 4, 4) if comm.rank == 0 else torch.ones(2))


@pytest.mark.guard("ReplicaConsistency")
@ranks(2, on="threads")
def test_a_change_on_one_rank_before_the_first_forward_is_noticed(comm):
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(1))
    optimizer = torchmn.create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
    if comm.rank == 1:
        with torch.no_grad():
            model[0].weight.add_(1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(torchmn.MismatchError, match=r"0\.weight"):
        optimizer.step()


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_chain_of_lazy_components_is_the_whole_model(comm, microbatches):
    chain = torchmn.MultiNodeChainList(comm, microbatches)
    last = comm.size - 1
    chain.add_link(
        nn.LazyLinear(3).double(), comm.rank - 1 if comm.rank else None, comm.rank + 1 if comm.rank < last else None
    )
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = chain(x) if comm.rank == 0 else chain()
    states = [nn.Linear(2 if rank == 0 else 3, 3).double() for rank in range(comm.size)]
    for layer, state in zip(states, comm.allgather_obj(chain[0].state_dict()), strict=True):
        layer.load_state_dict(state)
    whole = nn.Sequential(*states)
    y.sum().backward()
    whole(x).sum().backward()
    assert torch.allclose(chain[0].weight.grad, states[comm.rank].weight.grad)
    optimizer.step()


@ranks(2, on="threads")
def test_mean_gradients_leave_lazy_parameters_out(comm):
    model = nn.ModuleList([nn.LazyLinear(1), nn.Linear(1, 1)])
    model[1].weight.grad = torch.full((1, 1), float(comm.rank))
    comm.multi_node_mean_grad(model, zero_fill=True)
    assert model[1].weight.grad.item() == 0.5
