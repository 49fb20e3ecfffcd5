"""Optimizers, and the options of single layers.

`build(parameters)` returns a torch optimizer. `set_epoch` sets its learning rates and momentum, which are functions of
the epoch, so that a resumed run uses the same values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from pydantic import Field, model_validator
from torch import nn

from torchmn.errors import ExperimentError
from torchmn.experiment.file.fields import Fraction, NotNegative, Positive, invalid
from torchmn.experiment.file.registry import Options, register_optimizer
from torchmn.experiment.file.registry import optimizers as registered
from torchmn.experiment.vocabulary.layers.build import errors_at
from torchmn.experiment.vocabulary.layers.options import OWN, Momentum, ParameterGroup, Ramp
from torchmn.experiment.vocabulary.schedules import ScheduleField, TorchSchedule
from torchmn.optim.combined import CombinedOptimizer

LARGEST_LR = 1e38
"""Near the largest float32, to which torch converts learning rates."""


class Optimizer(Options):
    """Base class of optimizers, with the options common to all of them."""

    lr: NotNegative = Field(description="the learning rate")
    weight_decay: NotNegative = 0.0
    schedule: ScheduleField = None

    def build(self, parameters: Iterable[ParameterGroup]) -> torch.optim.Optimizer:
        """Returns a torch optimizer for groups of parameters, the result of `parameter_groups`."""
        raise NotImplementedError

    def set_epoch(self, optimizer: torch.optim.Optimizer, epoch: int, epochs: int) -> None:
        """Sets the learning rates (and momentum) for `epoch`, counted from 0."""
        first = [group.setdefault("first_lr", group["lr"]) for group in optimizer.param_groups]
        for group, values in zip(optimizer.param_groups, self._scheduled(first, epoch, epochs), strict=True):
            lr = values["lr"]
            if not lr < LARGEST_LR:
                raise ExperimentError(
                    f"{self.where}: the learning rate of epoch {epoch + 1} would be {lr:g}, expected less than "
                    f"{LARGEST_LR:g}: use a smaller lr or another schedule"
                )
            group.update(values)

    def _scheduled(self, lrs: list[float], epoch: int, epochs: int) -> list[ParameterGroup]:
        """Returns, per group, the scheduled learning rate in `epoch`, and momentum if the schedule changes it."""
        if isinstance(self.schedule, TorchSchedule):
            return self.schedule.values(self.build, lrs, epoch, epochs)
        try:
            factor = self.schedule.factor(epoch, epochs) if self.schedule else 1.0
        except OverflowError:
            factor = math.inf
        return [{"lr": lr * factor} for lr in lrs]

    def groups(self, parameters: Iterable[ParameterGroup], *rules: str) -> list[ParameterGroup]:
        """Returns the groups without keys of this package; raises if a layer sets an option that is not in `rules`."""
        result = []
        for group in parameters:
            for key in group:
                if key not in ("params", "own_momentum", *rules):
                    what = "momentum ramp" if key == "ramp" and "momentum" in rules else "momentum"
                    raise ExperimentError(
                        f"{self.where}: {self.kind} has no {what}, but the `optimizer:` of a layer sets one: remove it "
                        "there, or use sgd"
                    )
            result.append({key: value for key, value in group.items() if key != "own_momentum"})
        return result


registered.function_base = Optimizer


def layer_optimizer_options(model: nn.Module) -> dict[str, ParameterGroup]:
    """Returns the optimizer options that layers set for themselves, by parameter name."""
    found: dict[str, ParameterGroup] = {}
    for prefix, module in model.named_modules():
        own = vars(module)
        for name, _ in module.named_parameters():
            options = own.get("optimizer_options")
            if "bias" in name:
                options = own.get("bias_optimizer_options", options)
            if options is not None:
                found[f"{prefix}.{name}" if prefix else name] = options
    return found


def parameter_groups(model: nn.Module, layer_options: Mapping[str, ParameterGroup]) -> list[ParameterGroup]:
    """Returns the parameters of a model in groups with equal options.

    Args:
        model: the model, sharded or not.
        layer_options: the result of `layer_optimizer_options`, for the model before it was sharded.
    """
    groups: dict[str, ParameterGroup] = {}
    for name, parameter in model.named_parameters():
        options = dict(layer_options.get(name, {}))
        if "momentum" in options:
            options["own_momentum"] = True
        groups.setdefault(repr(sorted(options.items())), {**options, "params": []})["params"].append(parameter)
    return list(groups.values())


class OptimizerRules:
    """The optimizer of an experiment and those of layers with another one, each with its parameters.

    Args:
        main: of the experiment.
        groups: the result of `parameter_groups`.

    Attributes:
        optimizer: a torch optimizer of all parameters.
    """

    def __init__(self, main: Optimizer, groups: Iterable[ParameterGroup]):
        by_rule: dict[str, tuple[Optimizer, list[ParameterGroup]]] = {}
        for group in groups:
            rule = group.get(OWN, main)
            rest = {key: value for key, value in group.items() if key != OWN}
            by_rule.setdefault(repr(rule), (rule, []))[1].append(rest)
        self._parts = [(rule, _built(rule, own)) for rule, own in by_rule.values()]
        built = [part for _, part in self._parts]
        self.optimizer = built[0] if len(built) == 1 else CombinedOptimizer(built)

    def set_epoch(self, epoch: int, epochs: int) -> None:
        """Sets the learning rates (and momentum) for `epoch`, counted from 0, of `epochs`."""
        for rule, part in self._parts:
            rule.set_epoch(part, epoch, epochs)


def _built(rule: Optimizer, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
    with errors_at(rule.where, rule.kind):
        return rule.build(groups)


@register_optimizer("sgd", "gradient_descent")
class SGD(Optimizer):
    """Stochastic gradient descent, optionally with momentum."""

    momentum: Momentum = 0.0
    nesterov: bool = False
    dampening: Fraction = 0.0

    @model_validator(mode="after")
    def _check_momentum(self) -> SGD:
        if self.nesterov and (self.momentum == 0.0 or self.dampening):
            raise invalid("has nesterov, which needs a momentum, such as 0.9, and no dampening")
        if isinstance(self.momentum, Ramp) and getattr(self.schedule, "changes_momentum", False):
            raise invalid("has a momentum ramp and a schedule that also changes momentum: set cycle_momentum: false")
        return self

    def build(self, parameters: Iterable[ParameterGroup]) -> torch.optim.Optimizer:
        momentum = self.momentum.at(0) if isinstance(self.momentum, Ramp) else self.momentum
        # torch rejects Nesterov without momentum, and a ramp may start at 0.
        return torch.optim.SGD(
            parameters, self.lr, momentum, self.dampening, self.weight_decay, self.nesterov and momentum > 0
        )

    def set_epoch(self, optimizer: torch.optim.Optimizer, epoch: int, epochs: int) -> None:
        super().set_epoch(optimizer, epoch, epochs)
        for group in optimizer.param_groups:
            if "ramp" in group:  # set by a layer
                group["momentum"] = Ramp.model_validate(group["ramp"]).at(epoch)
            elif isinstance(self.momentum, Ramp) and not group.get("own_momentum"):
                group["momentum"] = self.momentum.at(epoch)
            group["nesterov"] = self.nesterov and group["momentum"] > 0


class _Adam(Optimizer):
    lr: NotNegative = 1e-3
    betas: list[Fraction] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: Positive = 1e-8


@register_optimizer("adam")
class Adam(_Adam):
    """Adam."""

    def build(self, parameters: Iterable[ParameterGroup]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay")
        return torch.optim.Adam(groups, self.lr, (self.betas[0], self.betas[1]), self.eps, self.weight_decay)


@register_optimizer("adamw")
class AdamW(_Adam):
    """Adam with decoupled weight decay."""

    weight_decay: NotNegative = 0.01

    def build(self, parameters: Iterable[ParameterGroup]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay")
        return torch.optim.AdamW(groups, self.lr, (self.betas[0], self.betas[1]), self.eps, self.weight_decay)


@register_optimizer("adadelta")
class Adadelta(Optimizer):
    """Adadelta."""

    lr: NotNegative = 1.0
    rho: Fraction = 0.9
    eps: Positive = 1e-6

    def build(self, parameters: Iterable[ParameterGroup]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay")
        return torch.optim.Adadelta(groups, self.lr, self.rho, self.eps, self.weight_decay)


@register_optimizer("rmsprop")
class RMSprop(Optimizer):
    """RMSprop."""

    lr: NotNegative = 1e-2
    alpha: Fraction = 0.99
    eps: Positive = 1e-8
    momentum: Fraction = 0.0

    def build(self, parameters: Iterable[ParameterGroup]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay", "momentum")
        return torch.optim.RMSprop(groups, self.lr, self.alpha, self.eps, self.weight_decay, self.momentum)


@register_optimizer("adagrad")
class Adagrad(Optimizer):
    """Adagrad."""

    lr: NotNegative = 1e-2
    eps: Positive = 1e-10

    def build(self, parameters: Iterable[ParameterGroup]) -> torch.optim.Optimizer:
        groups = self.groups(parameters, "lr", "weight_decay")
        return torch.optim.Adagrad(groups, self.lr, weight_decay=self.weight_decay, eps=self.eps)
