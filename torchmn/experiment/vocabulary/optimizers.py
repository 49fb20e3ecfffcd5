"""Optimizers and how their numbers change from epoch to epoch.

`build(parameters)` gives torch's optimizer; `set_epoch` sets its learning rates and momentum, which depend on nothing
but the epoch: after a resume they are what they would have been.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import nn

from torchmn.errors import ExperimentError
from torchmn.experiment.file.fields import NotNegative, Positive, Share, problem
from torchmn.experiment.file.registry import Options, register_optimizer
from torchmn.experiment.file.registry import optimizers as registered
from torchmn.experiment.vocabulary.layers.options import Momentum, Ramp
from torchmn.experiment.vocabulary.schedules import ScheduleField, TorchSchedule

LARGEST_LR = 1e38
"""Near the largest number of float32, which torch turns learning rates into."""


class Optimizer(Options):
    """What every optimizer has."""

    lr: NotNegative = Field(description="the learning rate")
    weight_decay: NotNegative = 0.0
    schedule: ScheduleField = None

    def build(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        raise NotImplementedError

    def set_epoch(self, optimizer: torch.optim.Optimizer, epoch: int, epochs: int) -> None:
        """Set the learning rates (and momentum) of `epoch`, the first being 0."""
        first = [group.setdefault("first_lr", group["lr"]) for group in optimizer.param_groups]
        for group, values in zip(optimizer.param_groups, self._scheduled(first, epoch, epochs), strict=True):
            lr = values["lr"]
            if not lr < LARGEST_LR:
                raise ExperimentError(
                    f"{self.where}: the learning rate of epoch {epoch + 1} would be {lr:g}, and torch takes less than "
                    f"{LARGEST_LR:g}: choose a smaller lr, or another schedule"
                )
            group.update(values)

    def _scheduled(self, lrs: list[float], epoch: int, epochs: int) -> list[dict[str, Any]]:
        """What the schedule makes of the learning rates of all groups in `epoch`, and of momentum if it changes it."""
        if isinstance(self.schedule, TorchSchedule):
            return self.schedule.values(self.build, lrs, epoch, epochs)
        try:
            factor = self.schedule.factor(epoch, epochs) if self.schedule else 1.0
        except OverflowError:
            factor = math.inf
        return [{"lr": lr * factor} for lr in lrs]

    def groups(self, parameters: Iterable[Any], *rules: str) -> list[dict[str, Any]]:
        """Groups of parameters with what layers say of their own; an ExperimentError where that is not in `rules`."""
        found = []
        for group in parameters:
            for key in group:
                if key not in ("params", "own_momentum", *rules):
                    what = "momentum that changes" if key == "ramp" and "momentum" in rules else "momentum"
                    raise ExperimentError(
                        f"{self.where}: {self.kind} has no {what}, and a layer's own `optimizer:` asks for one: "
                        "leave it out there, or use sgd"
                    )
            found.append({key: value for key, value in group.items() if key != "own_momentum"})
        return found


registered.base_of_functions = Optimizer


def own_rules(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The rules of layers that learn otherwise than the optimizer says, by the names of their parameters."""
    return {
        f"{prefix}.{name}" if prefix else name: module.own_rule  # type: ignore[misc]
        for prefix, module in model.named_modules()
        if hasattr(module, "own_rule")
        for name, _ in module.named_parameters()
    }


def parameter_groups(model: nn.Module, rules: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameters that follow the optimizer's rule, and those with a rule of their own."""
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        rule = dict(rules.get(name, {}))
        if "momentum" in rule:
            rule["own_momentum"] = True
        groups.setdefault(repr(sorted(rule.items())), {**rule, "params": []})["params"].append(parameter)
    return list(groups.values())


@register_optimizer("sgd", "gradient_descent")
class SGD(Optimizer):
    """Stochastic gradient descent, with momentum if asked for."""

    momentum: Momentum = 0.0
    nesterov: bool = False
    dampening: Share = 0.0

    @model_validator(mode="after")
    def _momentum(self) -> SGD:
        if self.nesterov and (self.momentum == 0.0 or self.dampening):
            raise problem("has nesterov, which needs a momentum, as 0.9, and no dampening")
        if isinstance(self.momentum, Ramp) and getattr(self.schedule, "changes_momentum", False):
            raise problem("has a momentum that changes, and a schedule that changes it too: say cycle_momentum: false")
        return self

    def build(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        momentum = self.momentum.at(0) if isinstance(self.momentum, Ramp) else self.momentum
        # torch refuses Nesterov without momentum, which a ramp may begin with.
        return torch.optim.SGD(
            parameters, self.lr, momentum, self.dampening, self.weight_decay, self.nesterov and momentum > 0
        )

    def set_epoch(self, optimizer: torch.optim.Optimizer, epoch: int, epochs: int) -> None:
        super().set_epoch(optimizer, epoch, epochs)
        for group in optimizer.param_groups:
            if "ramp" in group:  # a layer's own
                group["momentum"] = Ramp.model_validate(group["ramp"]).at(epoch)
            elif isinstance(self.momentum, Ramp) and not group.get("own_momentum"):
                group["momentum"] = self.momentum.at(epoch)
            group["nesterov"] = self.nesterov and group["momentum"] > 0


class _Adam(Optimizer):
    lr: NotNegative = 1e-3
    betas: list[Share] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: Positive = 1e-8


@register_optimizer("adam")
class Adam(_Adam):
    """Adam."""

    def build(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay")
        return torch.optim.Adam(groups, self.lr, (self.betas[0], self.betas[1]), self.eps, self.weight_decay)


@register_optimizer("adamw")
class AdamW(_Adam):
    """Adam with decoupled weight decay."""

    weight_decay: NotNegative = 0.01

    def build(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay")
        return torch.optim.AdamW(groups, self.lr, (self.betas[0], self.betas[1]), self.eps, self.weight_decay)


@register_optimizer("adadelta")
class Adadelta(Optimizer):
    """Adadelta."""

    lr: NotNegative = 1.0
    rho: Share = 0.9
    eps: Positive = 1e-6

    def build(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay")
        return torch.optim.Adadelta(groups, self.lr, self.rho, self.eps, self.weight_decay)


@register_optimizer("rmsprop")
class RMSprop(Optimizer):
    """RMSprop."""

    lr: NotNegative = 1e-2
    alpha: Share = 0.99
    eps: Positive = 1e-8
    momentum: Share = 0.0

    def build(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay", "momentum")
        return torch.optim.RMSprop(groups, self.lr, self.alpha, self.eps, self.weight_decay, self.momentum)


@register_optimizer("adagrad")
class Adagrad(Optimizer):
    """Adagrad."""

    lr: NotNegative = 1e-2
    eps: Positive = 1e-10

    def build(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay")
        return torch.optim.Adagrad(groups, self.lr, weight_decay=self.weight_decay, eps=self.eps)
