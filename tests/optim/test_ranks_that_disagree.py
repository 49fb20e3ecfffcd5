"""Ranks whose optimizers have different options or gradients raise an error on all ranks, before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchmn
from tests._worlds import ranks
from tests._worlds.agreements import recorded_agreements
from tests.optim.problem import assert_close, batch, loss_of, make_model
from torchmn.optim import create_multi_node_optimizer

NEEDS_GRAD_DTYPE = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="gradients are of their parameter's dtype in this torch"
)
ON_ONE_RANK = {
    "grad_dtype": torch.float16,
    "double_buffering": True,
    "overlap": True,
    "zero_fill": False,
}


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("option", ON_ONE_RANK)
def test_an_option_on_one_rank_only_is_an_error_on_all(comm, option: str) -> None:
    plain = torch.optim.SGD(make_model().parameters(), lr=1.0)
    options: dict[str, Any] = {option: ON_ONE_RANK[option]} if comm.rank == 1 else {}
    with pytest.raises(torchmn.MismatchError, match=option):
        create_multi_node_optimizer(plain, comm, **options)


@ranks(2, on="threads")
@pytest.mark.parametrize("grad_dtype", [torch.int8, torch.float8_e4m3fn, "float16"])
def test_gradients_are_sent_as_16_bit_floats_or_unchanged(comm, grad_dtype: Any) -> None:
    plain = torch.optim.SGD(make_model().parameters(), lr=1.0)
    with pytest.raises(torchmn.ArgumentError, match=r"expected grad_dtype to be torch.float16"):
        create_multi_node_optimizer(plain, comm, grad_dtype=grad_dtype if comm.rank == 0 else None)


@ranks(2, on="threads")
def test_an_optimizer_that_one_rank_cannot_wrap_is_an_error_on_all(comm) -> None:
    model = make_model()
    plain: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(torchmn.ArgumentError, match=r"rank 1 of 2: .*expected a torch.optim.Optimizer, got str"):
        create_multi_node_optimizer(plain if comm.rank == 0 else "sgd", comm)
    other = model if comm.rank == 0 else make_model()
    with pytest.raises(torchmn.ArgumentError, match=r"rank 1 of 2: .*holds none of the parameters of `model`"):
        create_multi_node_optimizer(plain, comm, model=other)
    with pytest.raises(torchmn.ArgumentError, match=r"rank 0 of 2: .*expected model to be a torch.nn.Module"):
        create_multi_node_optimizer(plain, comm, model=model if comm.rank == 1 else "model")


@ranks(2, on="threads")
def test_a_group_that_is_added_with_another_weight_decay_is_an_error_on_all(comm) -> None:
    optimizer = create_multi_node_optimizer(torch.optim.SGD(make_model().parameters(), lr=1.0), comm)
    with pytest.raises(torchmn.MismatchError, match=r"weight_decay 0.1"):
        optimizer.add_param_group({"params": make_model(1).parameters(), "weight_decay": 0.1 * comm.rank})


@ranks(2, on="threads")
def test_scalers_that_found_different_things_are_an_error_on_all(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model, *batch(0))).backward()
    if comm.rank == 0:
        model[0].weight.grad[0, 0] = float("inf")
    scaler.unscale_(optimizer)  # too early: at this rank's gradients
    optimizer.synchronize()
    with pytest.raises(torchmn.MismatchError, match="overflow found True"):
        scaler.step(optimizer)


@ranks(2, on="threads")
def test_scalers_with_different_scales_are_an_error_on_all(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 + comm.rank)
    scaler.scale(loss_of(model, *batch(0))).backward()
    optimizer.synchronize()
    with pytest.raises(torchmn.MismatchError, match=r"scale 5\.0"):
        scaler.step(optimizer)


@ranks(2, 3, on="threads")
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_closure_on_a_rank_without_samples_leaves_the_loss_of_the_others(comm, shape: tuple[int, ...]) -> None:
    x, y = batch(0)
    runs = []
    for world, part in ((comm, slice(None) if comm.rank == 0 else slice(0)), (comm.split(comm.rank), slice(None))):
        model = make_model()
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        optimizer = create_multi_node_optimizer(lbfgs, world)
        mine = x[part], y[part]

        def closure(optimizer=optimizer, model=model, mine=mine) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, *mine).reshape(shape)  # nan where there are no samples
            loss.backward()
            return loss

        loss = optimizer.step(closure, weight=len(mine[0]))
        runs.append([loss.reshape(()), *(p.detach() for p in model.parameters())])
    assert torch.isfinite(runs[0][0])
    assert_close(*runs)


@ranks(2, on="threads")
@pytest.mark.parametrize("on_one_rank", ["backward", "zero_grad"])
def test_a_mean_that_only_some_ranks_still_have_is_an_error_on_all(comm, on_one_rank: str) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    loss_of(model, *batch(0)).backward()
    optimizer.synchronize()
    if comm.rank == 1 and on_one_rank == "backward":
        loss_of(model, *batch(1)).backward()
    elif comm.rank == 1:
        optimizer.zero_grad()
    before = model[0].weight.detach().clone()
    with pytest.raises(torchmn.MismatchError, match="optimizer step after synchronize"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)


@ranks(2, on="threads")
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"double_buffering": True}], ids=str)
def test_the_watchdog_sees_every_agreement_of_an_optimizer(comm, options: dict[str, bool]) -> None:
    with recorded_agreements() as names:
        use_every_method(comm, options)
    expected = {"create_multi_node_optimizer", "weigh", "add_param_group", "optimizer step"}
    assert expected <= {*names}


def use_every_method(comm, options: dict[str, bool]) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, model=model, **options)
    optimizer.weigh(loss_of(model, *batch(0)), 3).backward()
    optimizer.step()
    optimizer.add_param_group({"params": make_model(1).parameters()})
    if not options.get("double_buffering"):
        loss_of(model, *batch(0)).backward()
        optimizer.synchronize()
        optimizer.step()
    loss_of(model, *batch(0)).backward()
    optimizer.zero_grad()
    if not options:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, *batch(0))).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
    optimizer.flush()


@NEEDS_GRAD_DTYPE
@ranks(2, 3, on="threads")
def test_a_gradient_of_another_dtype_than_its_parameter_counts_as_zeros_of_that_dtype_where_it_is_missing(comm) -> None:
    wide, plain = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(5))
    wide.grad_dtype = torch.float32
    optimizer = create_multi_node_optimizer(torch.optim.SGD([wide, plain], lr=1.0, foreach=False), comm)
    if comm.rank == 0:
        wide.grad = torch.full((5,), float(comm.size))
    plain.grad = torch.full((5,), float(comm.rank))
    optimizer.step()
    assert (wide == -1).all() and (plain == -(comm.size - 1) / 2).all()


@NEEDS_GRAD_DTYPE
@ranks(2, on="threads")
def test_gradients_of_other_dtypes_on_other_ranks_are_an_error_on_all(comm) -> None:
    parameter = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    dtype = torch.float32 if comm.rank == 1 else torch.bfloat16
    parameter.grad_dtype = dtype
    optimizer = create_multi_node_optimizer(torch.optim.SGD([parameter], lr=1.0, foreach=False), comm)
    parameter.grad = torch.ones(5, dtype=dtype)
    with pytest.raises(torchmn.MismatchError, match=r"of torch.bfloat16 and torch.float32 on different ranks"):
        optimizer.step()
