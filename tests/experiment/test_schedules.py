"""Schedules of torch.optim.lr_scheduler have torch's values at any epoch, also after a resume."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from tests.experiment.files import swap
from tests.experiment.running import experiment, read, registry, train
from tests.experiment.test_same_numbers import EVERYTHING
from torchmn.errors import ExperimentError

EPOCHS = 7
ARGUMENTS = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 4], "gamma": 0.3},
    "ConstantLR": {"total_iters": 3},
    "LinearLR": {"start_factor": 0.2, "total_iters": 4},
    "ExponentialLR": {"gamma": 0.7},
    "CosineAnnealingLR": {"T_max": 3, "eta_min": 0.01},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.2, "step_size_up": 2},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": EPOCHS},
    "PolynomialLR": {"total_iters": 4, "power": 2.0},
}


def groups():
    return [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))], "lr": 0.03}]


@pytest.mark.parametrize("name", registry.schedules.entries)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_every_epoch_has_the_numbers_of_plain_torch(kind, name):
    schedule = registry.schedules.find(name)(**ARGUMENTS[name])
    rule = registry.optimizers.find(kind)(lr=0.1, schedule=schedule)
    plain, ours = rule.build(groups()), rule.build(groups())
    scheduler = getattr(torch.optim.lr_scheduler, name)(plain, **ARGUMENTS[name])
    for epoch in range(EPOCHS):
        rule.set_epoch(ours, epoch, EPOCHS)
        resumed = rule.build(groups())
        rule.set_epoch(resumed, epoch, EPOCHS)
        for key in ("lr", "momentum", "betas"):
            expected = [group.get(key) for group in plain.param_groups]
            for optimizer in (ours, resumed):
                assert [group.get(key) for group in optimizer.param_groups] == expected, (epoch, key)
        plain.step()
        scheduler.step()


def test_a_resumed_run_is_bitwise_equal(tmp_path):
    schedule = "optimizer.schedule={name: CosineAnnealingWarmRestarts, T_0: 3}"
    chosen = experiment(EVERYTHING, "dtype=float64", "epochs=4", schedule)
    whole = train(chosen)
    steps = len(whole.losses) // 4
    first = train(chosen, checkpoints=str(tmp_path), stop_after=2 * steps + 1)
    second = train(chosen, checkpoints=str(tmp_path), resume=True)
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(second.weights[name], weight) for name, weight in whole.weights.items())
    assert whole.losses != train(experiment(EVERYTHING, "dtype=float64", "epochs=4", "optimizer.schedule=null")).losses
    assert train(chosen, 2, "datapar").losses == pytest.approx(whole.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("{name: StepLr, step_size: 3}", "x.yaml:8:50: there is no schedule 'StepLr'. Did you mean 'StepLR'?"),
        ("{name: StepLR, step_siz: 3}", "x.yaml:8:58: StepLR has no key 'step_siz'. Did you mean 'step_size'?"),
        ("StepLR", "x.yaml:8:43: StepLR needs the key 'step_size'"),
        ("{name: CyclicLR, scale_fn: x}", "CyclicLR has no key 'scale_fn'"),
        ("{name: MultiStepLR, milestones: [1, a]}", "8:79: expected MultiStepLR's milestones to be an integer"),
        (
            "ReduceLROnPlateau",
            "x.yaml:8:43: the schedule 'ReduceLROnPlateau' is not supported: it depends on a measured",
        ),
        ("{name: LambdaLR}", "x.yaml:8:50: the schedule 'LambdaLR' is not supported: a file cannot contain functions"),
        ("{name: OneCycleLR, max_lr: 1}, momentum: {from: 0.5, to: 0.9, end: 2}", "set cycle_momentum: false"),
    ],
)
def test_an_invalid_schedule_is_reported_with_its_place(schedule, message):
    with pytest.raises(ExperimentError, match=re.escape(message)):
        read("x.yaml", swap("lr: 0.1", f"lr: 0.1, schedule: {schedule}"))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("{name: OneCycleLR, max_lr: 1, total_steps: 2}", "OneCycleLR: Tried to step 3 times"),
        ("{name: CosineAnnealingWarmRestarts, T_0: 0}", "CosineAnnealingWarmRestarts: Expected positive integer T_0"),
        ("{name: StepLR, step_size: 0}", "StepLR: "),
    ],
)
def test_a_schedule_that_torch_rejects_raises_an_error_before_the_first_step(schedule, message):
    chosen = read("x.yaml", swap("lr: 0.1", f"lr: 0.1, schedule: {schedule}"))
    optimizer = chosen.optimizer.build(groups())
    with pytest.raises(ExperimentError, match=rf"x\.yaml:8:43: {re.escape(message)}"):
        chosen.optimizer.set_epoch(optimizer, 0, 5)
