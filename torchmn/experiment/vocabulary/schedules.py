"""Learning rate schedules: five short forms, and the classes of torch.optim.lr_scheduler.

Both are functions of the epoch, so that a resumed run uses the same values.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    WithJsonSchema,
    create_model,
    model_validator,
)
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from torchmn.errors import ExperimentError, nearest
from torchmn.experiment.file.fields import (
    DEFINITION,
    Count,
    NotNegative,
    Positive,
    ReferenceOrNested,
    Resolved,
    invalid,
)
from torchmn.experiment.file.registry import Options, Section
from torchmn.experiment.file.registry import schedules as registered
from torchmn.experiment.vocabulary.layers.options import ParameterGroup

# The short forms, each with an example.
SHORT_FORMS = {
    "step": "{step: [5, 8], ratio: 0.1}", "every": "{every: 3, ratio: 0.1}", "exponential": "{exponential: 0.9}",
    "linear": "{linear: 0.0}", "cosine": "{cosine: 0.0}",
}  # fmt: skip


class Schedule(Section):
    """A schedule in short form: one of step, every, exponential, linear, cosine."""

    step: list[Count] | None = Field(None, description="epochs after which the learning rate is multiplied by ratio")
    every: Count | None = Field(None, description="number of epochs after which it is multiplied by ratio, repeatedly")
    ratio: Positive | None = Field(None, description="factor for step and every; default: 0.1")
    shift: int | None = Field(None, ge=0, description="number of epochs by which step and every are moved forward")
    exponential: Positive | None = Field(None, description="factor after each epoch")
    linear: NotNegative | None = Field(None, description="fraction of the learning rate in the last epoch; linear")
    cosine: NotNegative | None = Field(
        None, description="fraction of the learning rate in the last epoch; half a cosine"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_form(cls, values: object) -> object:
        if isinstance(values, dict):
            named = [name for name in SHORT_FORMS if values.get(name) is not None]
            without = [name for name in SHORT_FORMS if name in values and not named]
            if without:  # `{cosine: }`
                raise invalid(f"{without[0]!r} needs a value, such as {SHORT_FORMS[without[0]]}")
            unknown = set(values) - set(SHORT_FORMS) - {"ratio", "shift"}
            if len(named) != 1 and not unknown:
                has = " and ".join(named) or "none of them"
                raise invalid(f"has {has}: expected one of {', '.join(SHORT_FORMS)}, or the name of a torch class")
            unused = [name for name in ("ratio", "shift") if values.get(name) is not None]
            if unused and not unknown and named[0] not in ("step", "every"):
                raise invalid(f"has {unused[0]} with {named[0]}: expected {unused[0]} with step or every only")
        return values

    def factor(self, epoch: int, epochs: int) -> float:
        """Returns the factor of the learning rate in `epoch` (counted from 0) of `epochs`."""
        done = epoch / max(epochs - 1, 1)
        ratio = 0.1 if self.ratio is None else self.ratio
        counted = epoch + (self.shift or 0)
        if self.step is not None:
            return ratio ** sum(counted >= at for at in self.step)
        if self.every is not None:
            return ratio ** (counted // self.every)
        if self.exponential is not None:
            return self.exponential**epoch
        if self.linear is not None:
            return 1 + (self.linear - 1) * done
        end = self.cosine or 0.0
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2


class TorchSchedule(Options):
    """A class of torch.optim.lr_scheduler, which steps after each epoch; the fields are its arguments."""

    torch_class: ClassVar[type[LRScheduler]]
    _values: dict[tuple[float, ...], list[list[ParameterGroup]]] = PrivateAttr(default_factory=dict)

    @property
    def changes_momentum(self) -> bool:
        """Whether it sets momentum (or betas) too."""
        return bool(getattr(self, "cycle_momentum", False))

    def values(
        self, build: Callable[[list[ParameterGroup]], torch.optim.Optimizer], lrs: list[float], epoch: int, epochs: int
    ) -> list[ParameterGroup]:
        """Returns, per group, the learning rate in `epoch` of `epochs`, and momentum if the schedule changes it.

        The scheduler runs once through all epochs on a dummy optimizer, so that checkpoints need no scheduler state.

        Args:
            build: returns an optimizer for groups of parameters.
            lrs: the initial learning rate of each group.
            epoch: counted from 0.
            epochs: the number of epochs of the run.
        """
        key = (*lrs, epochs)
        if key not in self._values:
            try:
                self._values[key] = self._run(build, lrs, epochs)
            except (ValueError, TypeError, ArithmeticError) as error:
                raise ExperimentError(f"{self.where}: {self.kind}: {error}") from error
        return self._values[key][epoch]

    def _run(
        self, build: Callable[[list[ParameterGroup]], torch.optim.Optimizer], lrs: list[float], epochs: int
    ) -> list[list[dict[str, Any]]]:
        optimizer = build([{"params": [torch.nn.Parameter(torch.zeros(()))], "lr": lr} for lr in lrs])
        arguments = {name: getattr(self, name) for name in type(self).model_fields}
        scheduler = self.torch_class(optimizer, **arguments)
        changed = ("lr", "momentum", "betas") if self.changes_momentum else ("lr",)
        result = []
        for epoch in range(epochs):
            if epoch:
                optimizer.step()  # torch warns if the scheduler steps first
                scheduler.step()
            result.append([{key: group[key] for key in changed if key in group} for group in optimizer.param_groups])
        return result


NEEDS_FUNCTION = "a file cannot contain functions. Register an optimizer, or use another schedule"
NEEDS_SCHEDULERS = "it consists of other schedulers. Use one of these, or `step`"
registered.unsupported = {
    "LambdaLR": NEEDS_FUNCTION,
    "MultiplicativeLR": NEEDS_FUNCTION,
    "ChainedScheduler": NEEDS_SCHEDULERS,
    "SequentialLR": NEEDS_SCHEDULERS,
    "ReduceLROnPlateau": "it depends on a measured cost, whose rounding depends on the number of ranks. Use `step` "
    "with the epochs at which the learning rate decreases",
}
NOT_OPTIONS = ("self", "optimizer", "last_epoch", "verbose")


def _register(cls: type[LRScheduler]) -> None:
    # torch imports some of these names for type checkers only. In a file, an iterable is a list.
    hints = get_type_hints(cls.__init__, localns={"Iterable": list, "Callable": Callable, "Literal": Literal})
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        kind = _option_type(hints.get(name, Any))
        if name not in NOT_OPTIONS and kind is not None:
            fields[name] = (kind, ... if parameter.default is parameter.empty else parameter.default)
    made = create_model(
        cls.__name__, __base__=TorchSchedule, __doc__=f"torch.optim.lr_scheduler.{cls.__name__}.", **fields
    )
    made.torch_class = cls
    registered.register(cls.__name__)(made)


def _option_type(hint: Any) -> Any:
    """Returns the type of an option: a number where torch also accepts one per group; None for functions."""
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        first = next((_option_type(part) for part in parts if get_origin(part) is not list), None)
        return first if first is None or len(parts) == len(get_args(hint)) else first | None
    if get_origin(hint) is Iterable:  # as torch 2.6 annotates; pydantic would keep an iterator, which cannot be saved
        return list[get_args(hint)]
    return None if get_origin(hint) is Callable else hint


for _name in lr_scheduler.__all__:
    _class = getattr(lr_scheduler, _name)
    if _name not in ("LRScheduler", *registered.unsupported) and issubclass(_class, LRScheduler):
        _register(_class)


def _check_name(value: object) -> object:
    if isinstance(value, str):  # `schedule: cosine`
        unknown = f"is unknown. {nearest(value, (*SHORT_FORMS, *registered))}"
        raise invalid(
            f"{value!r} " + (f"needs a value, such as {SHORT_FORMS[value]}" if value in SHORT_FORMS else unknown)
        )
    return value


ScheduleField = Resolved[
    Schedule | TorchSchedule | None,
    ReferenceOrNested(registered, Schedule),
    BeforeValidator(_check_name),
    WithJsonSchema({"anyOf": [{DEFINITION: "schedule"}, {DEFINITION: "Schedule"}, {"type": "null"}]}),
]
