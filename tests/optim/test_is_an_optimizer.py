"""A multi-node optimizer behaves as a torch.optim.Optimizer."""

from __future__ import annotations

import pickle
import warnings
from copy import deepcopy

import pytest
import torch

import torchmn
from tests._worlds.marks import ranks
from tests.optim.problem import OPTIMIZERS, assert_close, batch, loss_of, make_model
from torchmn.optim import create_multi_node_optimizer

SMALL = {"on": ("threads", "mpi")}


def local(comm, step: int = 0):
    return [part.chunk(comm.size)[comm.rank] for part in batch(step)]


@ranks(1, 2, **SMALL)
def test_learning_rate_schedulers_drive_it(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    assert isinstance(optimizer, torch.optim.Optimizer)
    for expected in (1.0, 0.5, 0.25):
        assert scheduler.get_last_lr() == [expected]
        assert optimizer.param_groups[0]["lr"] == optimizer.actual_optimizer.param_groups[0]["lr"] == expected
        optimizer.zero_grad()
        loss_of(model, *local(comm)).backward()
        optimizer.step()
        scheduler.step()


@ranks(1, 2, **SMALL)
def test_its_state_dict_is_the_wrapped_one_and_loads_into_a_plain_optimizer(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(OPTIMIZERS["adam"](model.parameters()), comm)
    loss_of(model, *local(comm)).backward()
    optimizer.step()
    plain = OPTIMIZERS["adam"](make_model().parameters())
    plain.load_state_dict(optimizer.state_dict())
    again = create_multi_node_optimizer(OPTIMIZERS["adam"](model.parameters()), comm)
    again.load_state_dict(plain.state_dict())
    for saved, loaded in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert torch.equal(saved["exp_avg"], loaded["exp_avg"])


@ranks(1, 2, 3, **SMALL)
def test_the_first_step_steps(comm) -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    loss_of(model, *local(comm)).backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@ranks(1, 2, 3, **SMALL)
def test_rank_0s_parameters_and_buffers_reach_all_ranks_at_construction(comm) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for x in (*model.parameters(), *model.buffers()):
        x.data.fill_(comm.rank + 1)
    create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model)
    assert all((x == 1).all() for x in (*model.parameters(), *model.buffers()))


@ranks(2, 3, **SMALL)
def test_clipping_after_synchronize_sees_the_mean(comm) -> None:
    serial, model = make_model(), make_model()
    inner = torch.optim.SGD(serial.parameters(), lr=0.1)
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    loss_of(serial, *batch(0)).backward()
    expected = torch.nn.utils.clip_grad_norm_(serial.parameters(), 0.1)
    inner.step()
    loss_of(model, *local(comm)).backward()
    optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    torch.testing.assert_close(norm, expected)
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in serial.parameters()])


@ranks(2, 3, **SMALL)
def test_a_backward_after_synchronize_is_averaged_too(comm) -> None:
    serial, model = make_model(), make_model()
    inner = torch.optim.SGD(serial.parameters(), lr=0.1)
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    for step in range(2):
        loss_of(serial, *batch(step)).backward()
        loss_of(model, *local(comm, step)).backward()
        if step == 0:
            optimizer.synchronize()
    inner.step()
    optimizer.step()
    assert_close([p.detach() for p in model.parameters()], [p.detach() for p in serial.parameters()])


@ranks(2, **SMALL)
@pytest.mark.parametrize("explicit_unscale", [True, False])
def test_a_grad_scaler_works_after_synchronize_and_all_ranks_skip_an_overflow(comm, explicit_unscale: bool) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflow in (False, True):
        serial = make_model()
        serial.load_state_dict(model.state_dict())
        inner = torch.optim.SGD(serial.parameters(), lr=0.1)
        loss_of(serial, *batch(0)).backward()
        inner.step()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(loss_of(model, *local(comm))).backward()
        if overflow and comm.rank == 1:
            model[0].weight.grad[0, 0] = float("inf")
        optimizer.synchronize()
        if explicit_unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        expected = before if overflow else [p.detach() for p in serial.parameters()]
        assert_close([p.detach() for p in model.parameters()], expected)
    assert scaler.get_scale() == 4.0


@ranks(2, **SMALL)
def test_a_grad_scaler_without_synchronize_is_refused_on_every_rank(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, *local(comm))).backward()
    with pytest.raises(torchmn.ArgumentError, match="synchronize"):
        scaler.step(optimizer)


@ranks(1, 2, 3, **SMALL)
def test_parameters_added_later_become_rank_0s_and_are_trained(comm) -> None:
    model = make_model()
    extra = torch.nn.Parameter(torch.full((2,), float(comm.rank), dtype=torch.float64))
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    optimizer.add_param_group({"params": [extra]})
    assert (extra == 0).all()
    extra.grad = torch.full((2,), float(comm.rank), dtype=torch.float64)
    optimizer.step()
    assert extra.tolist() == [-(comm.size - 1) / 2] * 2


def with_an_unfrozen_weight(comm):
    """A model whose first weight is unfrozen, with other values on each rank, and an optimizer that saw it frozen."""
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    model[0].weight.data.fill_(comm.rank)
    model[0].weight.requires_grad_(True)
    return model, optimizer


@ranks(2, **SMALL)
def test_a_parameter_that_is_unfrozen_becomes_rank_0s(comm) -> None:
    model, optimizer = with_an_unfrozen_weight(comm)
    optimizer.step()
    assert (model[0].weight == 0).all()


@ranks(2, on="threads")
def test_a_parameter_that_is_unfrozen_before_a_group_is_added_becomes_rank_0s(comm) -> None:
    model, optimizer = with_an_unfrozen_weight(comm)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    optimizer.step()
    assert (model[0].weight == 0).all()


@ranks(2, 3, **SMALL)
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"double_buffering": True}])
def test_a_parameter_that_is_unfrozen_on_some_ranks_is_an_error_on_all(comm, options: dict) -> None:
    model = make_model()
    model[2].bias.requires_grad_(False)
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm, model=model, **options)
    if comm.rank == 0:
        model[2].bias.requires_grad_(True)
    loss_of(model, *local(comm)).backward()
    with pytest.raises(torchmn.MismatchError, match=r"unfrozen \('2.bias',\)"):
        optimizer.step()


@ranks(2, 3, **SMALL)
def test_a_gradient_that_no_rank_has_stays_absent_and_its_parameter_as_it_is(comm) -> None:
    model = make_model()
    frozen = model[2].weight.detach().clone()
    optimizer = create_multi_node_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), comm)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    assert model[2].weight.grad is None
    assert torch.equal(model[2].weight, frozen)


@ranks(2, 3, **SMALL)
def test_a_gradient_that_some_ranks_lack_counts_as_zeros_or_is_an_error_on_all(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, model=model)
    if comm.rank == 0:
        model[2].bias.grad = torch.ones(2, dtype=torch.float64)
    strict = create_multi_node_optimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), comm, model=model, zero_fill=False
    )
    with pytest.raises(torchmn.MismatchError, match=r"2\.bias: no gradient on rank 1"):
        strict.step()
    optimizer.step()
    torch.testing.assert_close(model[2].bias.grad, torch.full((2,), 1 / comm.size, dtype=torch.float64))


@ranks(2, 3, **SMALL)
def test_models_that_differ_are_an_error_on_all_ranks(comm) -> None:
    model = torch.nn.Linear(2, 3 + (comm.rank == 1))
    with pytest.raises(torchmn.MismatchError, match="not on rank"):
        create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)


@ranks(2, **SMALL)
def test_optimizers_that_would_step_differently_are_an_error_on_all_ranks(comm) -> None:
    weights = torch.nn.Linear(2, 3).parameters()
    unlike = torch.optim.SGD(weights, lr=0.5 if comm.rank else 0.1)
    with pytest.raises(torchmn.MismatchError, match=r"(?s)rank 0: .*SGD, group 0 \(lr 0.1.*rank 1: .*\(lr 0.5"):
        create_multi_node_optimizer(unlike, comm)
    kind = torch.optim.Adam if comm.rank else torch.optim.SGD
    with pytest.raises(torchmn.MismatchError, match=r"(?s)rank 0: .*optimizer SGD.*rank 1: .*optimizer Adam"):
        create_multi_node_optimizer(kind(torch.nn.Linear(2, 3).parameters(), lr=0.1), comm)
    fast = torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=0.1, foreach=bool(comm.rank))
    create_multi_node_optimizer(fast, comm)  # another way to the same numbers


@pytest.mark.guard("Mode")
@ranks(2, **SMALL)
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"double_buffering": True}])
def test_a_model_in_another_mode_on_one_rank_is_an_error_on_all(comm, options: dict) -> None:
    model = torch.nn.Sequential(make_model(), torch.nn.Dropout(0.5))
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, model=model, **options)
    if comm.rank == 1:
        model.eval()  # for an evaluation, and never set back
    loss_of(model, *local(comm)).backward()
    with pytest.raises(torchmn.MismatchError, match=r"(?s)rank 0: .*mode of the model train.*rank 1: .*eval"):
        optimizer.step()
    model.eval()
    optimizer.step()


@pytest.mark.guard("Hyperparameters")
@ranks(2, **SMALL)
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"double_buffering": True}])
def test_a_learning_rate_that_follows_a_ranks_own_loss_is_an_error_on_all(comm, options: dict) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm, model=model, **options)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 1.0 if comm.rank else 0.5):  # that of rank 1 does not fall
        schedule.step(loss)
    loss_of(model, *local(comm)).backward()
    with pytest.raises(torchmn.MismatchError, match=r"(?s)rank 0: .*\('lr', 1.0\).*rank 1: .*\('lr', 0.1\)"):
        optimizer.step()


@ranks(2, **SMALL)
def test_a_weight_on_one_rank_only_is_an_error_on_all(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    loss_of(model, *local(comm)).backward()
    with pytest.raises(torchmn.MismatchError, match="weighted True"):
        optimizer.step(weight=3 if comm.rank == 0 else None)
    with pytest.raises(torchmn.ArgumentError, match="weight"):
        optimizer.step(weight=-1 if comm.rank == 0 else 1)
    with pytest.raises(torchmn.MismatchError, match="weights of all ranks are 0"):
        optimizer.step(weight=0)
    optimizer.step(weight=torch.tensor(3))


@ranks(1, 2, on="threads")
def test_a_loss_is_weighed_by_a_number_of_samples_only(comm) -> None:
    optimizer = create_multi_node_optimizer(torch.optim.SGD(make_model().parameters(), lr=1.0), comm)
    loss = torch.ones(())
    for wrong in (-1, None, "many"):
        with pytest.raises(torchmn.ArgumentError, match="number of samples"):
            optimizer.weigh(loss, wrong if comm.rank == 0 else 1)
    with pytest.raises(torchmn.MismatchError, match="weights of all ranks are 0"):
        optimizer.weigh(loss, 0)
    assert comm.allreduce(optimizer.weigh(loss, 5 * comm.rank + 3), "mean") == 1


@ranks(1, 2, on="threads")
def test_a_closure_may_return_nothing(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    assert optimizer.step(lambda: loss_of(model, *local(comm)).backward()) is None
    for parameter in model.parameters():
        assert all(torch.equal(parameter, other) for other in comm.allgather(parameter.detach()))


@ranks(1, **SMALL)
def test_misuse_is_refused(comm) -> None:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = create_multi_node_optimizer(plain, comm)
    with pytest.raises(torchmn.TorchMNError, match="already"):
        create_multi_node_optimizer(optimizer, comm)
    with pytest.raises(torchmn.ArgumentError, match=r"expected a torch.optim.Optimizer, got Sequential"):
        create_multi_node_optimizer(model, comm)
    with pytest.raises(torchmn.ArgumentError, match="expected comm to be a communicator"):
        create_multi_node_optimizer(plain, None)
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        with pytest.raises(torchmn.ArgumentError, match="inside no_sync"):
            optimizer.step()
    buffered = create_multi_node_optimizer(plain, comm, double_buffering=True)
    loss_of(model, *batch(0)).backward()
    buffered.step()
    with pytest.raises(torchmn.ArgumentError, match="flush"):
        buffered.state_dict()
    with pytest.raises(torchmn.ArgumentError, match="flush"):
        buffered.load_state_dict(plain.state_dict())
    buffered.flush()
    buffered.load_state_dict(buffered.state_dict())
    for copied in (deepcopy, pickle.dumps):
        with pytest.raises(torchmn.ArgumentError, match="save its state_dict"):
            copied(buffered)


@ranks(2, on="threads")
def test_a_hundred_small_gradients_are_one_message_and_a_large_one_is_not_copied(comm, monkeypatch) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(50)), torch.nn.Linear(3, 100_000))
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(comm.rank))
    reduce, addresses = comm.buffers.reduce, []

    def noted(x: torch.Tensor, *rest, **more) -> torch.Tensor:
        addresses.append(x.data_ptr())
        return reduce(x, *rest, **more)

    monkeypatch.setattr(comm.buffers, "reduce", noted)
    optimizer.step()
    assert len(addresses) == 2
    assert model[50].weight.grad.data_ptr() in addresses
    assert all((parameter.grad == 0.5).all() for parameter in model.parameters())


@ranks(1, 2, **SMALL)
def test_step_hooks_see_the_mean(comm) -> None:
    model = make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), comm)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[2].bias.grad.clone()))
    model[2].bias.grad = torch.full((2,), float(comm.rank), dtype=torch.float64)
    optimizer.step()
    assert seen[0].tolist() == [(comm.size - 1) / 2] * 2


@ranks(1, 2, **SMALL)
def test_the_wrapped_optimizer_does_not_step_by_itself(comm) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = create_multi_node_optimizer(inner, comm)
    optimizer = create_multi_node_optimizer(inner, comm, zero_fill=False)  # as one does who changes an option
    loss_of(model, *local(comm)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(torchmn.ArgumentError, match="step of the SGD that a multi-node optimizer has wrapped"):
        inner.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@ranks(2, on="mpi")  # threads would catch each other's warnings
def test_a_model_that_was_replaced_after_the_optimizer_was_made_warns_once(comm) -> None:
    model, other = make_model(), make_model()
    optimizer = create_multi_node_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)
    loss_of(other, *local(comm)).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    assert len(caught) == (comm.rank == 0)
    for warning in caught:
        assert "no parameter of this optimizer has a gradient on any rank" in str(warning.message)
        assert warning.filename.endswith("test_is_an_optimizer.py")
